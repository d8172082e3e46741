"""Engine = simulator: one trace with the same durations gives the same steps at the same times."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request
from triptych.serve.core.step import Step
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.values import Ask
from triptych.serve.engine.worker import Done, Work
from triptych.simulate.replica import LinearCost, Replica, StepShape


class VirtualRanks:
    """An executor on a clock of its own: step j runs as the simulator says it does."""

    def __init__(self, limits: Limits, cost: LinearCost) -> None:
        self.now_s = 0.0
        self.steps: list[tuple[float, str]] = []
        self.shape_of: list[StepShape] = []
        self._cost, self._stages = cost, limits.stages
        self._free_s = [0.0] * limits.stages
        self._ends_s = deque([0.0] * limits.stages, maxlen=limits.stages)
        self.running: deque[tuple[float, Step]] = deque()

    def clock(self) -> float:
        return self.now_s

    def submit(self, work: Work) -> None:
        step = work.step
        self.steps.append((self.now_s, str(step)))
        at_s = max(self.now_s, self._ends_s[0])
        for stage, duration_s in enumerate(self._cost(self.shape_of.pop())):
            at_s = max(at_s, self._free_s[stage]) + duration_s
            self._free_s[stage] = at_s
        self._ends_s.append(at_s)
        self.running.append((at_s, step))

    def collect(self, timeout_s: float | None) -> Done | None:
        self.now_s, step = self.running.popleft()
        return Done(step.id, [0] * len(step.samples))

    def fileno(self) -> int:
        return -1

    def close(self, message: bytes | None = None) -> None:
        pass


class RecordedReplica(Replica):
    """A simulated replica that writes its steps down."""

    def __init__(self, limits: Limits, cost: LinearCost) -> None:
        super().__init__(limits, cost)
        self.steps: list[tuple[float, str]] = []
        plan = self.scheduler.plan

        def recorded(now_s: float) -> Step | None:
            step = plan(now_s)
            if step is not None:
                self.steps.append((now_s, str(step)))
            return step

        self.scheduler.plan = recorded  # type: ignore[method-assign]


def arrivals(count: int, seed: int) -> list[tuple[float, int, int]]:
    draws = np.random.default_rng(seed)
    times_s = np.cumsum(draws.exponential(0.02, count)).tolist()
    sizes = draws.integers(1, 90, count).tolist()
    answers = draws.integers(1, 40, count).tolist()
    return list(zip(times_s, sizes, answers, strict=True))


@pytest.mark.parametrize(("stages", "ahead_below_s"), [(1, math.inf), (2, math.inf), (1, 0.009)])
def test_the_engine_takes_the_decisions_of_the_simulator(stages: int, ahead_below_s: float) -> None:
    limits = Limits(
        num_blocks=30, model_context=160, max_running=12, token_budget=48, stages=stages,
        growth_tokens=0, overlap_chunks=stages > 1, ahead_below_s=ahead_below_s,
    )  # fmt: skip
    cost = LinearCost(fixed_s=0.004, token_s=2e-4, context_s=1e-6, pair_s=1e-7, stages=stages)
    replica, ranks = RecordedReplica(limits, cost), VirtualRanks(limits, cost)
    engine = Engine(ranks, limits, clock=ranks.clock)
    _lend_shapes(engine, replica, ranks)
    for number, (arrival_s, size, answer) in enumerate(arrivals(60, stages)):
        salt = number.to_bytes(8, "little")
        while replica.next_s <= arrival_s:
            replica.complete()
        request = Request(
            id=number, prompt=(0,) * size, max_tokens=answer, arrival_s=arrival_s, salt=salt
        )
        replica.submit(request, answer, arrival_s)
        while ranks.running and ranks.running[0][0] <= arrival_s:
            engine.step()
        ranks.now_s = arrival_s
        engine.add_request(Ask(id=number, prompt=(0,) * size, max_tokens=answer, salt=salt))
    while replica.next_s < math.inf:
        replica.complete()
    while engine.is_busy:
        engine.step()
    assert ranks.steps == replica.steps
    assert engine.load == replica.scheduler.load
    assert engine.load.num_preemptions > 0


def _lend_shapes(engine: Engine, replica: Replica, ranks: VirtualRanks) -> None:
    """The duration of a step depends on its shape, which the simulator reads from the books."""
    plan = engine.scheduler.plan
    stand_in = Replica(engine.limits, replica.cost)
    stand_in.scheduler = engine.scheduler

    def with_shape(now_s: float) -> Step | None:
        step = plan(now_s)
        if step is not None:
            ranks.shape_of.append(stand_in._shape(step))
        return step

    engine.scheduler.plan = with_shape  # type: ignore[method-assign]
