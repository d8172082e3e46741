"""What is asked for, and what became of it: values that driver and scheduler exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

DEFAULT_CLASS = "default"
"""The latency class of requests that name none."""


class State(StrEnum):
    """Where a request, or one of its sequences, is in its life.

    waiting -> running -> finished, with running -> preempted -> running in between; a request
    that is not admitted is refused and never lives.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    REFUSED = "refused"


class Reason(StrEnum):
    """Why a sequence ended."""

    LENGTH = "length"  # max_tokens, or the context limit
    STOP = "stop"  # the driver saw an end token or a stop text
    ABORT = "abort"  # nobody waits for it any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt that wants `n` continuations.

    Args:
        id: a number that no living request has.
        prompt: token ids, at least one.
        max_tokens: tokens to generate for each continuation; None is up to the context limit.
        n: continuations; they share the prompt's blocks.
        latency_class: name of a `LatencyClass` of the scheduler.
        arrival_s: seconds on the driver's clock.
        salt: requests reuse each other's prefixes only under the same salt.

    """

    id: int
    prompt: Sequence[int]
    max_tokens: int | None = None
    n: int = 1
    latency_class: str = DEFAULT_CLASS
    arrival_s: float = 0.0
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyClass:
    """The objectives of a kind of request.

    Args:
        ttft_s: seconds from arrival to the first token.
        tpot_s: seconds a token after that.
        priority: 0 is served first; each level more is worth one ageing time of waiting.

    """

    name: str = DEFAULT_CLASS
    ttft_s: float = 1.0
    tpot_s: float = math.inf
    priority: int = 0


class Refusal(NamedTuple):
    """Why a request was not admitted; `retry_after_s` is None if no waiting would help."""

    message: str
    retry_after_s: float | None = None


class Admission(NamedTuple):
    """The answer to a request: waiting, finished (nothing to generate), or refused and why."""

    state: State
    refusal: Refusal | None = None


class Finished(NamedTuple):
    """The end of one continuation."""

    request_id: int
    continuation: int
    reason: Reason


class Progress(NamedTuple):
    """What one completed step brought: a token for each continuation that lived, in the order of
    the step's samples.
    """

    answers: list[tuple[int, int]]  # request, continuation (0 <= continuation < n)
    tokens: Sequence[int]
    places: Sequence[int]  # of each among the samples of the step
    finished: list[Finished]
