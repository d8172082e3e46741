"""Models that share devices: turns by weight and guarantee, and one memory for keys and values."""

from __future__ import annotations

import random

import pytest

from triptych.errors import InputError
from triptych.serve.core.blocks import BlockPool
from triptych.serve.core.budget import Budget
from triptych.serve.core.check import broken_invariants
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.turns import Claim, Turns, shares


def test_shares_are_the_guarantee_and_a_part_of_the_rest_by_weight() -> None:
    assert shares([Claim(1, 0.5), Claim(3)]) == pytest.approx([0.625, 0.375])
    assert shares([Claim(), Claim(), Claim(2)]) == pytest.approx([0.25, 0.25, 0.5])


@pytest.mark.parametrize("seed", range(5))
def test_time_of_busy_members_is_by_share_whatever_a_step_takes(seed: int) -> None:
    draws = random.Random(seed)
    wanted = {"a": 0.5, "b": 0.3, "c": 0.2}
    turns, took = Turns(wanted), dict.fromkeys(wanted, 0.0)
    for _ in range(3000):
        member = turns.next(wanted)
        seconds = draws.uniform(0.1, 3.0) * {"a": 1, "b": 5, "c": 0.2}[member]
        turns.took(member, seconds)
        took[member] += seconds
    total = sum(took.values())
    for member, share in wanted.items():
        assert abs(took[member] - share * total) <= 2 * 15.0  # the longest step of each side


def test_who_comes_back_has_saved_no_turns_and_an_idle_share_goes_to_the_others() -> None:
    turns = Turns({"a": 0.5, "b": 0.5})
    for _ in range(10):  # b is idle
        assert turns.next(["a"]) == "a"
        turns.took("a", 1.0)
    turns.woke("b")
    first = [turns.next(["a", "b"]) for _ in range(1)]
    order = []
    for _ in range(6):
        member = turns.next(["a", "b"])
        turns.took(member, 1.0)
        order.append(member)
    assert first == ["b"] and order.count("a") == order.count("b") == 3


def test_members_come_and_go_and_those_who_stay_keep_their_time() -> None:
    turns = Turns({"a": 1.0})
    turns.next(["a"])
    turns.took("a", 5.0)
    turns.share_out({"a": 0.5, "b": 0.5})
    assert turns.next(["a", "b"]) == "b"
    turns.share_out({"a": 1.0})
    turns.took("b", 1.0)  # its last step ends when it has gone
    assert turns.next(["a"]) == "a"


def test_pub_100_a_busy_model_takes_what_is_not_guaranteed_to_others() -> None:
    """A memory of 1.5 times the full load of one model; half a load is guaranteed to each."""
    budget = Budget(1500)
    one, other = budget.join(10, 500), budget.join(10, 500)
    busy = BlockPool(100, one)
    held = busy.allocate(busy.num_free)
    assert len(held) == 100 and busy.num_free == 0
    late = BlockPool(100, other)
    theirs = late.allocate(late.num_free)  # its guarantee is there at once
    assert len(theirs) == 50 and late.num_free == 0
    busy.release(held[:30])
    assert (busy.num_free, late.num_free) == (30, 30) and one.num_returns == 1
    late.allocate(30)
    assert busy.num_free == 0
    late.release(theirs)
    assert busy.num_free == 30  # what is guaranteed to the other stays untouched


def test_pub_100_a_third_model_is_refused_with_the_bytes() -> None:
    budget = Budget(1000)
    budget.join(10, 400)
    budget.join(10, 400)
    with pytest.raises(InputError, match=r"300 bytes .*(.|\n)*200 of 1000 bytes are not"):
        budget.join(10, 300)
    allowance = budget.join(10, 0, least_blocks=20)
    assert allowance.guarantee_bytes == 200  # one request at its longest can always end
    allowance.leave()
    assert budget.join(10, 150).num_free == 20


@pytest.mark.parametrize("seed", range(4))
def test_two_schedulers_on_one_budget_finish_everything_and_never_hold_more(seed: int) -> None:
    draws, budget = random.Random(seed), Budget(30)
    limits = Limits(num_blocks=24, block_size=4, model_context=40, max_running=6, token_budget=24)
    both = [Scheduler(limits, allowance=budget.join(1, 10)) for _ in range(2)]
    flights: list[list[int]] = [[], []]
    waiting = [
        (n % 2, Request(id=n, prompt=(n,) * draws.randint(1, 20), max_tokens=draws.randint(1, 20)))
        for n in range(60)
    ]
    num_finished, now_s = 0, 0.0
    while num_finished < 60:
        now_s += 0.01
        if waiting and draws.random() < 0.5:
            which, request = waiting.pop()
            assert both[which].admit(request, now_s).refusal is None
        for which in draws.sample(range(2), 2):
            if flights[which] and draws.random() < 0.8:
                count = len(both[which].flights[0].samplers)
                done = both[which].complete(flights[which].pop(0), [1] * count, now_s)
                num_finished += len(done.finished)
            for index, scheduler in enumerate(both):
                while (step := scheduler.plan(now_s)) is not None:
                    flights[index].append(step.id)
        held = [scheduler.book.pool.allowance.held for scheduler in both]  # type: ignore[union-attr]
        assert sum(held) <= 30 and sum(max(h, 10) for h in held) <= 30
        assert [broken_invariants(scheduler) for scheduler in both] == [[], []]
        assert now_s < 1000, "somebody waits and nothing advances"
