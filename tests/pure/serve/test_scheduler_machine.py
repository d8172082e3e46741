"""Random lives: requests, plans, completions, aborts and late stops in any order, tiny pools."""

from __future__ import annotations

import math

from fake_engine import Driver, alone
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass, Request, State
from triptych.serve.core.scheduler import Scheduler

CLASSES = (
    LatencyClass(name="chat", ttft_s=0.2, tpot_s=0.02),
    LatencyClass(name="bulk", ttft_s=5.0, priority=1),
)


class Lives(RuleBasedStateMachine):
    """`Driver` checks every invariant after each event; the end checks texts and leaks."""

    @initialize(
        num_blocks=st.integers(4, 32),
        stages=st.integers(1, 3),
        ahead=st.integers(0, 1),
        overlap=st.booleans(),
        growth=st.integers(0, 8),
        reuse=st.booleans(),
        max_running=st.integers(1, 6),
        budget=st.integers(7, 40),
    )
    def begin(
        self,
        num_blocks: int,
        stages: int,
        ahead: int,
        overlap: bool,
        growth: int,
        reuse: bool,
        max_running: int,
        budget: int,
    ) -> None:
        self.limits = Limits(
            num_blocks=num_blocks,
            block_size=4,
            model_context=100,
            max_running=max_running,
            token_budget=budget,
            stages=stages,
            steps_ahead=ahead,
            ahead_below_s=0.05 if reuse else math.inf,
            overlap_chunks=overlap,
            growth_tokens=growth,
            prefix_reuse=reuse,
        )
        scheduler = Scheduler(self.limits, Policy(classes=CLASSES, ageing_s=1.0))
        self.driver = Driver(scheduler, stops=True)
        self.requests: dict[int, Request] = {}
        self.left: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), max_size=60),
        max_tokens=st.one_of(st.none(), st.integers(0, 40)),
        n=st.integers(1, 3),
        name=st.sampled_from(["chat", "bulk"]),
    )
    def admit(self, prompt: list[int], max_tokens: int | None, n: int, name: str) -> None:
        driver, number = self.driver, len(self.requests)
        request = Request(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            n=n,
            latency_class=name,
            arrival_s=driver.now_s,
        )
        self.requests[number] = request
        total = len(prompt) + (max_tokens or 0)
        fits = bool(prompt) and total <= self.limits.context and n <= self.limits.max_running
        state = driver.admit(request)
        assert (state is not State.REFUSED) == fits
        if state is not State.WAITING:
            self.left.add(number)

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.pending)
    @rule(duration_s=st.sampled_from([0.001, 0.01, 0.1]))
    def complete(self, duration_s: float) -> None:
        self.driver.complete(duration_s)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        self.driver.scheduler.abort(number)
        self.driver.check()
        self.left.add(number)

    @rule(number=st.integers(0, 30), continuation=st.integers(0, 2))
    def stop_late(self, number: int, continuation: int) -> None:
        if self.driver.scheduler.stop(number, continuation):
            self.left.add(number)
        self.driver.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.driver.assert_empty()
        for number in self.requests.keys() - self.left:
            request = self.requests[number]
            for index in range(request.n):
                expected = alone(request, self.limits.context, index, stops=True)
                assert self.driver.texts[number, index] == expected


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
