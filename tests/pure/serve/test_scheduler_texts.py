"""Batched, chunked, preempted, forked, reused: every text is that of the request alone."""

from __future__ import annotations

import random

import pytest
from fake_engine import Driver, alone

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Reason, Request, State
from triptych.serve.core.scheduler import Scheduler


def limits_of(**changes: object) -> Limits:
    base = dict(
        num_blocks=64,
        block_size=4,
        model_context=128,
        max_running=8,
        token_budget=24,
        growth_tokens=1,
    )
    return Limits(**{**base, **changes})  # type: ignore[arg-type]


def requests_of(count: int, seed: int, most: int, n: int = 1) -> list[Request]:
    """Prompts and answers of 1 .. `most` tokens each; half of the prompts share a prefix."""
    rng = random.Random(seed)
    prefix = [rng.randrange(50) for _ in range(most)]
    found = []
    for i in range(count):
        size = rng.randint(1, most)
        own = [rng.randrange(50) for _ in range(size)]
        cut = rng.randint(0, size) if rng.random() < 0.5 else 0
        found.append(
            Request(
                id=i,
                prompt=tuple(prefix[:cut] + own[cut:]),
                max_tokens=rng.randint(1, most),
                n=rng.randint(1, n),
                arrival_s=i * 0.005,
            )
        )
    return found


@pytest.mark.parametrize(
    ("stages", "ahead", "overlap"), [(1, 0, False), (1, 1, False), (2, 0, True), (4, 1, False)]
)
@pytest.mark.parametrize(("num_blocks", "reuse"), [(32, False), (32, True), (200, True)])
def test_texts_are_those_of_each_request_alone(
    stages: int, ahead: int, overlap: bool, reuse: bool, num_blocks: int
) -> None:
    limits = limits_of(
        num_blocks=num_blocks,
        stages=stages,
        steps_ahead=ahead,
        overlap_chunks=overlap,
        prefix_reuse=reuse,
    )
    driver = Driver(Scheduler(limits), stops=True)
    rng = random.Random(stages)
    requests = requests_of(24, seed=stages + 10 * ahead, most=50, n=3)
    for request in requests:
        assert driver.admit(request) is State.WAITING
        for _ in range(rng.randint(0, 3)):
            driver.turn()
    driver.run()
    for request in requests:
        for index in range(request.n):
            expected = alone(request, limits.context, index, stops=True)
            assert driver.texts[request.id, index] == expected
    if num_blocks == 32:
        assert driver.scheduler.load.num_preemptions > 0
    assert (driver.scheduler.load.num_reused_tokens > 0) == reuse
    driver.assert_empty()


def test_the_last_token_of_a_reused_prompt_is_computed_again() -> None:
    driver = Driver(Scheduler(limits_of()))
    prompt = tuple(range(16))
    for number in range(2):
        driver.admit(Request(id=number, prompt=prompt, max_tokens=2))
        driver.run()
    first = [step.chunks[0] for step in driver.steps if step.chunks]
    assert [(c.start, c.num_tokens) for c in first] == [(0, 16), (12, 4)]
    assert driver.texts[0, 0] == driver.texts[1, 0]


def test_reused_blocks_include_those_of_an_answer() -> None:
    driver = Driver(Scheduler(limits_of()))
    first = Request(id=0, prompt=tuple(range(8)), max_tokens=9)
    driver.admit(first)
    driver.run()
    again = Request(id=1, prompt=(*first.prompt, *driver.texts[0, 0], 3), max_tokens=4)
    driver.admit(again)
    driver.run()
    assert driver.scheduler.load.num_reused_tokens == 16
    assert driver.texts[1, 0] == alone(again, 128)


def test_prefixes_are_not_shared_across_salts() -> None:
    driver = Driver(Scheduler(limits_of()))
    for number, salt in enumerate((b"one", b"two", b"one")):
        driver.admit(Request(id=number, prompt=tuple(range(9)), max_tokens=1, salt=salt))
        driver.run()
        assert driver.scheduler.load.num_reused_tokens == (8 if number == 2 else 0)


def test_forks_share_the_prompt_and_copy_only_its_partial_block() -> None:
    driver = Driver(Scheduler(limits_of()))
    driver.admit(Request(id=0, prompt=tuple(range(10)), max_tokens=5, n=3))
    step = driver.plan()
    assert step is not None and len(step.forks) == 2
    assert driver.scheduler.load.num_free_blocks == 64 - 3
    step = driver.plan()
    assert step is not None and len(step.copies) == 2  # the third owner keeps the original
    assert driver.scheduler.load.num_free_blocks == 64 - 5
    driver.run()
    for index in range(3):
        request = Request(id=0, prompt=tuple(range(10)), max_tokens=5)
        assert driver.texts[0, index] == alone(request, 128, index)
    driver.assert_empty()


def test_decodes_come_before_prompts_and_prompts_in_chunks() -> None:
    driver = Driver(Scheduler(limits_of(steps_ahead=0)))
    driver.admit(Request(id=0, prompt=(1,), max_tokens=20))
    driver.turn()
    driver.admit(Request(id=1, prompt=tuple(range(50)), max_tokens=1))
    driver.run()
    sizes = [(len(s.decodes), [c.num_tokens for c in s.chunks]) for s in driver.steps]
    assert sizes[1:4] == [(1, [23]), (1, [23]), (1, [4])]


def test_a_pipeline_has_a_batch_for_each_stage() -> None:
    driver = Driver(Scheduler(limits_of(stages=4, steps_ahead=0)))
    for number in range(8):
        driver.admit(Request(id=number, prompt=(number,), max_tokens=30))
    driver.run()
    middle = driver.steps[20:60]
    assert [len(step.decodes) for step in middle] == [2] * 40
    assert len({step.decodes for step in middle}) == 4


def test_a_step_is_planned_before_the_tokens_of_the_last_are_known() -> None:
    driver = Driver(Scheduler(limits_of(steps_ahead=1)))
    driver.admit(Request(id=0, prompt=(1, 2), max_tokens=3))
    one, two, three = driver.plan(), driver.plan(), driver.plan()
    assert one is not None and two is not None and three is None
    assert str(one) == "step 0; start 0=0.0 +0 of 2 in 0; chunk 0 0+2 >0"
    assert str(two) == "step 1; decode 0"
    driver.run()
    assert len(driver.steps) == 3  # nothing is computed past max_tokens


def test_stop_and_length_are_told_apart() -> None:
    driver = Driver(Scheduler(limits_of()), stops=True)
    requests = requests_of(30, seed=5, most=40)
    for request in requests:
        driver.admit(request)
    driver.run()
    for request in requests:
        text = driver.texts[request.id, 0]
        stopped = text[-1] == 7
        assert driver.ends[request.id, 0] is (Reason.STOP if stopped else Reason.LENGTH)
    assert set(driver.ends.values()) == {Reason.STOP, Reason.LENGTH}


def test_the_same_calls_give_the_same_steps() -> None:
    def steps() -> list[str]:
        driver = Driver(Scheduler(limits_of(num_blocks=32, stages=2)))
        for request in requests_of(20, seed=3, most=40, n=2):
            driver.admit(request)
            driver.turn()
        driver.run()
        return [str(step) for step in driver.steps]

    assert steps() == steps()
