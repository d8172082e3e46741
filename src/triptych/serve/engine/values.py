"""What goes into an engine and what comes out: values that may cross processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.serve.core.request import DEFAULT_CLASS, Reason
from triptych.serve.engine.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt that wants `n` answers.

    Args:
        id: a number that no living request has.
        prompt: token ids.
        max_tokens: tokens of each answer at most; None: up to the context limit.
        n: answers; each draws its own tokens.
        sampling: how tokens are chosen.
        latency_class: a class of the engine's policy.
        salt: prompts reuse each other's prefixes only under the same salt.

    """

    id: int
    prompt: Sequence[int]
    max_tokens: int | None = None
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    latency_class: str = DEFAULT_CLASS
    salt: bytes = b""


class Logprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token: int
    logprob: float


class Output(NamedTuple):
    """What a step brought for one answer: a token, its end, or both.

    An end token is given like others, with `finish` STOP: whether it is shown is for the reader.
    """

    request_id: int
    continuation: int  # 0 <= continuation < n
    token: int | None
    finish: Reason | None = None
    logprob: float | None = None  # if the request asked for it
    top: tuple[Logprob, ...] = ()  # the likeliest, best first
    prompt: tuple[PromptLogprob, ...] = ()  # with the first token, if the request asked for it


def bare_outputs(answers: Sequence[tuple[int, int]], tokens: Sequence[int]) -> list[Output]:
    """Outputs with a token and nothing else: a third of the cost of `Output(...)` for each."""
    new, pairs = tuple.__new__, zip(answers, tokens, strict=True)
    return [new(Output, (a, b, token, None, None, (), ())) for (a, b), token in pairs]


class PromptLogprob(NamedTuple):
    """A prompt token; the first one has no probability."""

    token: int
    logprob: float | None
    top: tuple[Logprob, ...] = ()
