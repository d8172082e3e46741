"""How the tokens of an answer are chosen: what a client may ask for, as one value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from triptych.errors import InputError, Problem

MOST_LOGPROBS = 20
"""Alternatives that may be listed beside each token."""

GrammarKind = Literal["json", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like: any JSON, a JSON schema, a regular expression, a grammar."""

    kind: GrammarKind
    text: str = ""  # the schema as JSON, the expression, or the grammar; nothing for "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The choice of tokens, greedy unless a temperature is given.

    Args:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: only the k likeliest; None: all.
        top_p: only the likeliest that together have this probability.
        min_p: only those with at least this share of the probability of the likeliest.
        presence_penalty: taken from the logit of what the answer has already.
        frequency_penalty: the same, once for each time.
        repetition_penalty: above 1, what prompt or answer have gets less likely (Keskar 2019).
        logit_bias: added to the logits of token ids.
        seed: equal seeds give equal answers; None draws one.
        logprobs: how many of the likeliest tokens are listed beside each one; None: not even the
            log-probability of the token itself. They are those of the model, before all else here.
        prompt_logprobs: the same for the tokens of the prompt, whose blocks are then not reused.
        min_tokens: no end token before so many tokens.
        ignores_end: end tokens of the model are tokens like others.
        stop_ids: more token ids that end the answer.
        grammar: what the answer must look like.

    Raises:
        InputError: with every value that does not work.

    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    min_tokens: int = 0
    ignores_end: bool = False
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        problems = list(_broken(self))
        if problems:
            raise InputError(problems)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token of the bare logits is all that is wanted."""
        extras = self.logit_bias, self.grammar, self.has_penalties, self.min_tokens
        return self.temperature == 0 and self.logprobs is None and not any(extras)


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, math.inf, "0 (greedy) or a positive number"),
    ("top_p", 0.0, 1.0, "above 0, at most 1"),
    ("min_p", 0.0, 1.0, "from 0 to 1"),
    ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
    ("repetition_penalty", 0.0, math.inf, "a positive number; 1 is none"),
)
_ABOVE_ZERO = ("top_p", "repetition_penalty")


def _broken(sampling: Sampling) -> Iterator[Problem]:
    for name, least, most, works in _RANGES:
        value = getattr(sampling, name)
        fits = math.isfinite(value) and least <= value <= most
        if not fits or (value == 0 and name in _ABOVE_ZERO):
            yield Problem(f"{name} = {value}", works=works)
    if sampling.top_k is not None and sampling.top_k < 1:
        yield Problem(f"top_k = {sampling.top_k}", works="from 1, or none for all tokens")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MOST_LOGPROBS:
        yield Problem(f"logprobs = {sampling.logprobs}", works=f"from 0 to {MOST_LOGPROBS}")
    if sampling.min_tokens < 0:
        yield Problem(f"min_tokens = {sampling.min_tokens}", works="from 0")
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            yield Problem(f"logit_bias[{token_id}] = {bias}", works="from -100 to 100")
