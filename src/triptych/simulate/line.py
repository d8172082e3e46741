"""The stages that several simulated replicas share, and whose step is next on them.

A step that is planned waits until the first stage is free and it is its replica's turn
(`serve.core.turns`); then it takes each stage behind the step before it. The line of one replica
alone has no choice: its steps take the stages in their order. Event order: a stage that comes free
takes its next step before the step that left it is completed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from triptych.serve.core.step import Step
from triptych.serve.core.turns import Turns


class Planned(NamedTuple):
    """A step that waits for its turn."""

    planned_s: float
    step: Step
    seconds: Sequence[float]  # on each stage


class Runner(Protocol):
    """A replica, as far as its line knows it."""

    @property
    def next_s(self) -> float:
        """When its next step completes; infinite if none runs."""
        ...

    def start(self, planned: Planned) -> None:
        """Lets a step take the stages."""

    def plan(self, now_s: float) -> None:
        """Plans all that may be in flight."""


class Line:
    """Stages, when each is free, and the replicas that share them."""

    def __init__(self, stages: int, shares: Sequence[float] = (1.0,)) -> None:
        self.free_s = [0.0] * stages
        self.runners: list[Runner] = []
        self._turns = Turns(dict(enumerate(shares)))
        self._queues: list[deque[Planned]] = [deque() for _ in shares]

    def join(self, runner: Runner) -> int:
        """The seat of one replica more."""
        self.runners.append(runner)
        return len(self.runners) - 1

    def add(self, seat: int, planned: Planned) -> None:
        """Lets a step wait; on a line without others it starts at once."""
        if len(self._queues) == 1:
            self.runners[seat].start(planned)
            return
        if not self._queues[seat] and math.isinf(self.runners[seat].next_s):
            self._turns.woke(seat)
        self._queues[seat].append(planned)

    def run(self, until_s: float) -> None:
        """Starts the steps whose turn comes before anything completes, up to a time."""
        while waiting := [seat for seat, queue in enumerate(self._queues) if queue]:
            first_s = min(self._queues[seat][0].planned_s for seat in waiting)
            at_s = max(self.free_s[0], first_s)
            if at_s > until_s or at_s > min(runner.next_s for runner in self.runners):
                return
            ready = [seat for seat in waiting if self._queues[seat][0].planned_s <= at_s]
            chosen = self._turns.next(ready)
            planned = self._queues[chosen].popleft()
            self._turns.took(chosen, planned.seconds[0])
            self.runners[chosen].start(planned)
