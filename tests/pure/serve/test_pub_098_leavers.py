"""PUB-098, PUB-084: leavers and empty prompts hurt nobody else and leave nothing behind."""

from __future__ import annotations

import random

from fake_engine import Driver, alone

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request, State
from triptych.serve.core.scheduler import Scheduler

LIMITS = Limits(
    num_blocks=48, block_size=4, model_context=128, max_running=12, token_budget=40, growth_tokens=1
)


def test_pub_098_a_hundred_leave_at_random_moments_and_five_stay() -> None:
    driver, rng = Driver(Scheduler(LIMITS)), random.Random(2)
    stay = [Request(id=i, prompt=[i] * (5 + i), max_tokens=50) for i in range(5)]
    for request in stay:
        driver.admit(request)
    leaves_at: dict[int, int] = {}
    for number in range(5, 105):
        prompt = [number % 7] * rng.randint(1, 60)
        driver.admit(Request(id=number, prompt=prompt, max_tokens=30, n=rng.randint(1, 2)))
        leaves_at[number] = len(driver.steps) + rng.randint(0, 25)
        for gone in [n for n, step in leaves_at.items() if step <= len(driver.steps)]:
            del leaves_at[gone]
            driver.scheduler.abort(gone)
            driver.check()
            assert gone not in driver.scheduler.book.living
            assert driver.scheduler.abort(gone) == 0  # late events are ignored
        driver.turn()
    for gone in leaves_at:
        driver.scheduler.abort(gone)
    driver.run()
    for request in stay:
        assert driver.texts[request.id, 0] == alone(request, LIMITS.context)
    driver.assert_empty()


def test_pub_098_work_for_a_leaver_stops_with_the_next_planned_step() -> None:
    driver = Driver(Scheduler(LIMITS))
    driver.admit(Request(id=0, prompt=[1] * 30, max_tokens=50))
    driver.turn()
    slot = driver.scheduler.book.living[0][0].slot
    driver.scheduler.abort(0)
    driver.admit(Request(id=1, prompt=[2], max_tokens=2))
    steps = len(driver.steps)
    driver.run()
    assert driver.steps[steps].released == (slot,)
    assert all(s.request_id == 1 for step in driver.steps[steps:] for s in step.started)
    assert driver.texts.keys() <= {(0, 0), (1, 0)} and len(driver.texts[1, 0]) == 2


def test_pub_084_an_empty_prompt_is_refused_alone() -> None:
    driver = Driver(Scheduler(LIMITS))
    long = Request(id=0, prompt=[1, 2, 3], max_tokens=60)
    driver.admit(long)
    for number in range(1, 20):
        assert driver.admit(Request(id=number, prompt=[], n=1 + number % 2)) is State.REFUSED
        driver.turn()
    driver.run()
    assert driver.texts[0, 0] == alone(long, LIMITS.context)
    driver.assert_empty()
