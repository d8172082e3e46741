"""One context limit, enforced on arrival with the numbers; a full or late queue says when."""

from __future__ import annotations

import pytest
from fake_engine import Driver

from triptych.errors import InputError
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import Admission, LatencyClass, Request, State
from triptych.serve.core.scheduler import Scheduler

SMALL = Limits(num_blocks=8, block_size=4, model_context=100, max_running=4, token_budget=16)


def ask(scheduler: Scheduler, size: int, max_tokens: int | None = 1, n: int = 1) -> Admission:
    number = len(scheduler.book.living)
    return scheduler.admit(Request(id=number, prompt=[1] * size, max_tokens=max_tokens, n=n), 0.0)


def test_pub_085_the_context_limit_is_the_smaller_of_model_and_pool() -> None:
    assert SMALL.context == 32
    assert Limits(num_blocks=100, model_context=64, max_running=1).context == 64


@pytest.mark.parametrize(
    ("size", "max_tokens", "words"),
    [
        (0, 1, "no tokens"),
        (33, None, "33 tokens; the context limit is 32"),
        (64, 1, "64 tokens; the context limit is 32"),
        (30, 3, "together 33; the context limit is 32 tokens: max_tokens of at most 2"),
        (32, 1, "max_tokens of at most 0"),
        (4, -1, "max_tokens is -1"),
    ],
)
def test_pub_085_what_can_never_fit_is_refused_with_the_numbers(
    size: int, max_tokens: int | None, words: str
) -> None:
    scheduler = Scheduler(SMALL)
    answer = ask(scheduler, size, max_tokens)
    assert answer.state is State.REFUSED and answer.refusal is not None
    assert words in answer.refusal.message and answer.refusal.retry_after_s is None
    assert scheduler.plan(0.0) is None


@pytest.mark.parametrize("n", [0, 5])
def test_continuations_are_as_many_as_run_at_once(n: int) -> None:
    answer = ask(Scheduler(SMALL), 4, 4, n=n)
    assert answer.refusal is not None and "from 1 to 4" in answer.refusal.message


def test_pub_085_at_the_limit_nothing_is_generated_or_as_much_as_fits() -> None:
    driver = Driver(Scheduler(SMALL))
    assert driver.admit(Request(id=0, prompt=[1] * 32)) is State.FINISHED
    assert driver.admit(Request(id=1, prompt=[1] * 31)) is State.WAITING
    assert driver.admit(Request(id=2, prompt=[1] * 30, max_tokens=2)) is State.WAITING
    assert driver.admit(Request(id=3, prompt=[1], max_tokens=0)) is State.FINISHED
    driver.run()
    assert [len(driver.texts[i, 0]) for i in (1, 2)] == [1, 2]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    limits = Limits(num_blocks=8, model_context=64, max_running=1, max_waiting=2)
    scheduler = Scheduler(limits)
    answers = [ask(scheduler, 4) for _ in range(3)]
    assert [a.state for a in answers] == [State.WAITING, State.WAITING, State.REFUSED]
    refusal = answers[-1].refusal
    assert refusal is not None and refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1 and "2 requests are waiting" in refusal.message


def test_an_unknown_latency_class_is_an_error_that_names_the_near_ones() -> None:
    scheduler = Scheduler(SMALL, Policy(classes=(LatencyClass(name="chat"),)))
    with pytest.raises(InputError, match="chat"):
        scheduler.admit(Request(id=0, prompt=[1], latency_class="chta"), 0.0)


def test_all_wrong_limits_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Limits(num_blocks=0, model_context=0, max_running=8, token_budget=8, steps_ahead=2)
    assert len(caught.value.problems) == 4
    with pytest.raises(InputError) as caught:
        Policy(classes=(LatencyClass(ttft_s=0), LatencyClass(tpot_s=-1)), ageing_s=-1)
    assert len(caught.value.problems) == 4


def test_what_would_miss_its_objective_is_refused_once_the_throughput_is_known() -> None:
    limits = Limits(num_blocks=400, model_context=400, max_running=8, token_budget=100)
    policy = Policy(classes=(LatencyClass(ttft_s=0.5),), refuses_late=True)
    driver = Driver(Scheduler(limits, policy))
    for number in range(20):  # nothing is known yet: all 4,000 tokens are let in
        assert driver.admit(Request(id=number, prompt=[number] * 200, max_tokens=1))
    for _ in range(8):  # about 100 tokens in 0.1 s
        while driver.plan() is not None:
            pass
        driver.complete(0.1)
    request = Request(id=99, prompt=[1] * 200, max_tokens=1, arrival_s=driver.now_s)
    answer = driver.scheduler.admit(request, driver.now_s)
    assert answer.refusal is not None and "objective of class default is 0.5 s" in str(answer)
    assert answer.refusal.retry_after_s == pytest.approx(3.0, rel=0.3)


def test_a_long_prompt_alone_in_a_pipeline_does_not_pass_for_a_full_one() -> None:
    """It is in one batch at a time; the other stages have room, and nobody is refused."""
    limits = Limits(num_blocks=4000, model_context=9000, max_running=8, token_budget=100, stages=4)
    classes = (LatencyClass(ttft_s=1.0), LatencyClass(name="bulk", ttft_s=100.0))
    driver = Driver(Scheduler(limits, Policy(classes=classes, refuses_late=True)))
    driver.admit(Request(id=0, prompt=[1] * 8050, max_tokens=1, latency_class="bulk"))
    for _ in range(20):
        while driver.plan() is not None:
            pass
        driver.complete(0.4)  # a chunk of 100 tokens through four stages
        request = Request(id=99, prompt=[2] * 200, max_tokens=1, arrival_s=driver.now_s)
        assert driver.admit(request) is State.WAITING
        driver.scheduler.abort(99)


def test_where_there_is_room_what_a_queue_taught_does_not_count() -> None:
    limits = Limits(num_blocks=400, model_context=400, max_running=1, token_budget=100)
    classes = (LatencyClass(ttft_s=5.0), LatencyClass(name="bulk", ttft_s=60.0))
    driver = Driver(Scheduler(limits, Policy(classes=classes, refuses_late=True)))
    for number in range(5):  # in turn, 0.4 s each
        driver.admit(Request(id=number, prompt=[number] * 50, max_tokens=40))
    driver.run()
    for number in range(5, 100):  # far more a second, one after the other: nobody waits
        request = Request(id=number, prompt=[1] * 50, max_tokens=1, arrival_s=driver.now_s)
        assert driver.admit(request) is State.WAITING
        driver.run()
    bulk = Request(id=100, prompt=[1], latency_class="bulk", arrival_s=driver.now_s)
    assert driver.admit(bulk) is State.WAITING
