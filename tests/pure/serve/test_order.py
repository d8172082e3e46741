"""Who is served first: due times, priorities that age, pace under a TPOT objective."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fake_engine import Driver

from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.pace import Pace
from triptych.serve.core.request import LatencyClass, Request
from triptych.serve.core.scheduler import Scheduler

LIMITS = Limits(
    num_blocks=64, block_size=4, model_context=256, max_running=2, token_budget=16, steps_ahead=0
)
CLASSES = (
    LatencyClass(name="chat", ttft_s=1.0),
    LatencyClass(name="bulk", ttft_s=60.0),
    LatencyClass(name="free", ttft_s=1.0, priority=1),
)
POLICY = Policy(classes=CLASSES, ageing_s=10.0)


def request_of(number: int, name: str, arrival_s: float) -> Request:
    return Request(
        id=number, prompt=[number] * 8, max_tokens=4, latency_class=name, arrival_s=arrival_s
    )


def starts(driver: Driver) -> list[int]:
    return [start.request_id for step in driver.steps for start in step.started]


def test_the_earliest_due_starts_first_and_a_level_is_worth_the_ageing_time() -> None:
    driver = Driver(Scheduler(LIMITS, POLICY))
    arrivals = [("bulk", 0.0), ("free", 0.0), ("chat", 9.0), ("chat", 11.0), ("free", 2.0)]
    for number, (name, arrival_s) in enumerate(arrivals):
        driver.admit(request_of(number, name, arrival_s))
    driver.run()
    assert starts(driver) == [2, 1, 3, 4, 0]


def test_within_a_class_first_come_first_served() -> None:
    driver = Driver(Scheduler(LIMITS, POLICY))
    for number, arrival_s in enumerate([3.0, 1.0, 2.0]):
        driver.admit(request_of(number, "chat", arrival_s))
    driver.run()
    assert starts(driver) == [1, 2, 0]


def test_nothing_starves_under_an_endless_stream_of_urgent_requests() -> None:
    driver = Driver(Scheduler(LIMITS, POLICY))
    driver.admit(request_of(0, "free", 0.0))
    arrivals = {0: 0.0}
    while (0, 0) not in driver.ends:  # more arrive than can be served
        number = len(arrivals)
        arrivals[number] = driver.now_s
        driver.admit(request_of(number, "chat", driver.now_s))
        driver.turn()
        driver.now_s += 0.1
        assert number < 1000
    before = starts(driver)[: starts(driver).index(0)]
    assert max(arrivals[number] for number in before) <= 10.0  # the ageing time
    assert len(arrivals) > len(before) + 10


def test_blocks_are_taken_from_the_latest_of_the_lowest_priority() -> None:
    limits = Limits(
        num_blocks=9,
        block_size=4,
        model_context=24,
        max_running=3,
        token_budget=30,
        growth_tokens=1,
    )
    driver = Driver(Scheduler(limits, POLICY))
    for number, (name, arrival_s) in enumerate([("free", 0.0), ("chat", 0.2), ("chat", 0.1)]):
        driver.admit(
            Request(
                id=number,
                prompt=[number] * 5,
                max_tokens=16,
                latency_class=name,
                arrival_s=arrival_s,
            )
        )
    preempted: list[int] = []
    while driver.turn():
        waiting = driver.scheduler.book.waiting
        preempted += [
            s.request.id for s in waiting if s.preemptions and s.request.id not in preempted
        ]
    assert preempted[:2] == [0, 1]


def test_a_request_of_better_priority_takes_the_place_of_a_running_one() -> None:
    driver = Driver(Scheduler(LIMITS, POLICY))
    for number in range(2):
        driver.admit(request_of(number, "free", 0.0))
    driver.turn()
    driver.admit(request_of(2, "bulk", 0.0))  # due later than both: waits
    driver.turn()
    assert driver.scheduler.load.num_preemptions == 0
    driver.admit(request_of(3, "chat", 1.0))
    driver.turn()
    assert driver.scheduler.load.num_preemptions == 1
    driver.run()
    assert starts(driver) == [0, 1, 3, 1, 2]
    assert len(driver.ends) == 4


def test_prompts_yield_while_steps_last_longer_than_the_tpot_objective() -> None:
    pace = Pace(1600)
    for _ in range(20):
        pace.note(0.1, 0.05)
    assert pace.allowance == 200
    for _ in range(30):
        pace.note(0.01, 0.05)
    assert pace.allowance == 1600
    pace.note(0.1, 0.08)
    assert pace.allowance == 1280
    pace.note(0.1, math.inf)
    assert pace.allowance == 1600


def test_steps_shrink_to_keep_the_pace_of_those_that_decode() -> None:
    limits = Limits(num_blocks=2000, model_context=4096, max_running=8, token_budget=1024)
    classes = (LatencyClass(name="chat", tpot_s=0.05), LatencyClass(name="bulk", ttft_s=60.0))
    driver = Driver(Scheduler(limits, Policy(classes=classes)))
    driver.admit(Request(id=0, prompt=[1], max_tokens=60, latency_class="chat"))
    driver.turn()
    for number in range(1, 6):
        driver.admit(Request(id=number, prompt=[number] * 4000, max_tokens=1, latency_class="bulk"))
    durations = []
    while (0, 0) not in driver.ends:
        while driver.plan() is not None:
            pass
        durations.append(0.01 + 1e-4 * driver.pending[0][0].num_tokens)
        driver.complete(durations[-1])
    assert max(durations) > 0.1
    assert sum(durations[-40:]) / 40 < 0.06
    driver.run()


@pytest.mark.parametrize(
    ("n", "size", "growth_tokens"),
    [(2, 8, 0), (1, 44, 0), (1, 8, 20)],  # two slots, eleven blocks, room for the two that stay
)
def test_nobody_is_preempted_in_vain(n: int, size: int, growth_tokens: int) -> None:
    """One victim has not so much."""
    limits = Limits(num_blocks=18, block_size=4, model_context=64, max_running=3, token_budget=64)
    limits = replace(limits, growth_tokens=0)
    driver = Driver(Scheduler(limits, POLICY))
    for number, name in enumerate(("chat", "chat", "free")):
        request = Request(id=number, prompt=[number] * 16, max_tokens=3, latency_class=name)
        driver.admit(request)
    driver.plan()
    assert driver.scheduler.load.num_running == 3
    driver.scheduler.book.limits = replace(limits, growth_tokens=growth_tokens)
    driver.admit(Request(id=3, prompt=[3] * size, n=n, max_tokens=9, latency_class="chat"))
    driver.plan()
    assert driver.scheduler.load.num_preemptions == 0
    driver.run()


def test_a_preempted_prompt_waits_for_its_chunk_in_flight() -> None:
    limits = Limits(
        num_blocks=64, block_size=4, model_context=64, max_running=1, token_budget=8, stages=3
    )
    driver = Driver(Scheduler(limits, POLICY))
    driver.admit(Request(id=1, prompt=[1] * 40, max_tokens=4, latency_class="free"))
    driver.plan()
    driver.admit(Request(id=2, prompt=[2], max_tokens=4, latency_class="chat"))
    driver.plan()
    assert driver.scheduler.load.num_preemptions == 1
    driver.scheduler.abort(2)
    assert driver.plan() is None
    driver.run()
    assert len(driver.texts[1, 0]) == 4
