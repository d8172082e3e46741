"""PUB-096: always progress, or rejection; `Driver` checks that each plan advances something."""

from __future__ import annotations

import random

import pytest
from fake_engine import Driver, alone

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request, State
from triptych.serve.core.scheduler import Scheduler


@pytest.mark.parametrize("stages", [1, 2])
def test_pub_096_forty_requests_share_a_pool_of_32_blocks(stages: int) -> None:
    limits = Limits(
        num_blocks=32,
        block_size=4,
        model_context=4096,
        max_running=16,
        token_budget=64,
        growth_tokens=1,
        stages=stages,
    )
    driver, rng = Driver(Scheduler(limits)), random.Random(1)
    requests = []
    for number in range(40):
        wanted = rng.randint(4, 28) * 4
        size = rng.randint(1, wanted - 1)
        prompt = tuple(rng.randrange(50) for _ in range(size))
        requests.append(Request(id=number, prompt=prompt, max_tokens=wanted - size))
        assert driver.admit(requests[-1]) is State.WAITING
        for _ in range(rng.randint(0, 4)):
            driver.turn()
    driver.run()
    for request in requests:
        assert driver.texts[request.id, 0] == alone(request, limits.context)
    assert driver.scheduler.load.num_preemptions > 10
    driver.assert_empty()


def test_pub_096_a_pool_exactly_one_longest_request_big() -> None:
    limits = Limits(
        num_blocks=16,
        block_size=4,
        model_context=64,
        max_running=8,
        token_budget=32,
        growth_tokens=1,
    )
    driver = Driver(Scheduler(limits))
    requests = [Request(id=i, prompt=[i] * (1 + 9 * i), max_tokens=None) for i in range(7)]
    for request in requests:
        driver.admit(request)
    too_long = Request(id=99, prompt=[1] * 60, max_tokens=5)
    assert driver.admit(too_long) is State.REFUSED
    driver.run()
    for request in requests:
        assert driver.texts[request.id, 0] == alone(request, 64)
    driver.assert_empty()


def test_pub_096_the_first_due_advances_in_every_step() -> None:
    limits = Limits(
        num_blocks=20,
        block_size=4,
        model_context=80,
        max_running=8,
        token_budget=24,
        growth_tokens=1,
    )
    driver = Driver(Scheduler(limits))
    for number in range(12):
        driver.admit(Request(id=number, prompt=[number] * 20, max_tokens=60, n=2))
    while driver.scheduler.book.living:
        first = min(s.order for group in driver.scheduler.book.living.values() for s in group)
        step = driver.plan()
        while step is not None:
            touched = {*step.decodes, *(chunk.slot for chunk in step.chunks)}
            owner = [s for s in driver.scheduler.book.living[first[1]] if s.order == first]
            done = owner[0].planned == owner[0].end
            assert done or owner[0].slot in touched
            step = driver.plan()
        if driver.pending:
            driver.complete()
