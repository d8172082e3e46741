"""The router: what it foresees, where it sends, what it refuses, and what it learns."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from triptych.fleet.router import Place, Router, Ticket, Wanted
from triptych.fleet.shared import RowCost, Seat, SharedFleet, SharedGroup
from triptych.fleet.terms import Terms
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice, StepTimes
from triptych.serve.core.request import Refusal, State
from triptych.serve.core.turns import Claim
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.trace import Trace, make, uniform_lengths

PRICE = StepPrice(0.01, 0.001, 0.0002)
LIMITS = Limits(num_blocks=4000, model_context=4096, max_running=64, token_budget=512,
                prefix_reuse=False)  # fmt: skip


def place_of(model: str, group: int, terms: Terms | None = None) -> Place:
    return Place(model, group, terms or Terms(), StepTimes(PRICE), LIMITS)


def routed(router: Router, model: str, prompt: int, output: int, now_s: float = 0.0) -> Ticket:
    found = router.route(model, Wanted(prompt, output), now_s)
    assert isinstance(found, Ticket)
    return found


def trace_of(rate: float, models: int, seconds: float = 20.0, cv: float = 3.0) -> Trace:
    rng = np.random.default_rng(1)
    arrival_s = draw([Window(seconds, rate, cv)], rng)
    model = rng.integers(0, models, len(arrival_s))
    return make(arrival_s, uniform_lengths((5, 60), (5, 40)), rng, model, tuple("abcd"[:models]))


def fleet_of(
    groups: list[tuple[int, ...]],
    terms: dict[int, Terms],
    limits: Limits = LIMITS,
    **options: object,
) -> SharedFleet:
    seats = [
        SharedGroup(
            seats=tuple(
                Seat(model=m, cost=RowCost(PRICE), limits=limits, price=PRICE) for m in models
            )
        )
        for models in groups
    ]
    return SharedFleet(seats, terms, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (100, 20), (1500, 8)])
def test_what_is_foreseen_of_a_request_alone_is_what_the_simulator_does(
    prompt: int, output: int
) -> None:
    router = Router()
    router.add(place_of("0", 0))
    foreseen = routed(router, "0", prompt, output).foreseen
    trace = make(np.zeros(1), uniform_lengths((prompt,) * 2, (output,) * 2),
                 np.random.default_rng(0))  # fmt: skip
    (record,) = fleet_of([(0,)], {0: Terms()}).run(trace)
    assert foreseen.ttft_s == pytest.approx(record.ttft_s)
    assert foreseen.answer_s == pytest.approx(record.finish_s)


def test_what_is_foreseen_behind_others_is_what_the_simulator_does() -> None:
    """Requests at once: each is foreseen with those before it, and all share the steps."""
    draws = random.Random(3)
    sizes = [(draws.randint(5, 60), draws.randint(5, 40)) for _ in range(12)]
    router = Router()
    router.add(place_of("0", 0))
    foreseen = [routed(router, "0", *size).foreseen for size in sizes]
    rng = np.random.default_rng(0)
    trace = make(np.zeros(len(sizes)), lambda *_: (np.array([s[0] for s in sizes]),
                 np.array([s[1] for s in sizes])), rng)  # fmt: skip
    records = fleet_of([(0,)], {0: Terms()}).run(trace)
    # The first ones cannot know who comes behind them and shares their steps; the last one does.
    assert foreseen[-1].answer_s == pytest.approx(records[-1].finish_s, rel=0.1)
    assert all(f.answer_s <= r.finish_s * 1.1 for f, r in zip(foreseen, records, strict=True))


def test_a_request_waits_until_those_in_front_leave_memory_for_it() -> None:
    few = replace(LIMITS, num_blocks=20)
    router = Router()
    router.add(Place("0", 0, Terms(), StepTimes(PRICE), few))
    sizes = [(200, 50), (100, 10)]
    foreseen = [routed(router, "0", *size).foreseen for size in sizes]
    trace = make(np.zeros(2), lambda *_: (np.array([200, 100]), np.array([50, 10])),
                 np.random.default_rng(0))  # fmt: skip
    records = fleet_of([(0,)], {0: Terms()}, few).run(trace)
    assert records[1].first_token_s > records[0].finish_s
    assert foreseen[1].ttft_s == pytest.approx(records[1].ttft_s, rel=0.05)


@pytest.mark.parametrize(("num_blocks", "least"), [(4000, 0.95), (30, 0.85)])
@pytest.mark.parametrize("rate", [60.0, 120.0])
def test_what_is_admitted_under_overload_keeps_its_objectives(
    rate: float, num_blocks: int, least: float
) -> None:
    """With a TPOT objective fewer run than there are slots; in a small memory fewer still."""
    limits, terms = replace(LIMITS, num_blocks=num_blocks), {0: Terms(ttft_s=1.0, tpot_s=0.03)}
    fleet = fleet_of([(0,)], terms, limits)
    records = fleet.run(trace_of(rate, 1, cv=1.0))
    admitted = [record for record in records if record.state is not State.REFUSED]
    assert len(admitted) < 0.9 * len(records)
    assert np.mean([fleet.met(record) for record in admitted]) > least


def test_another_model_takes_its_share_and_no_more_than_it_has() -> None:
    router = Router()
    mine, other = (router.add(place_of(name, 0)) for name in "ab")
    alone = router.foresee(mine, Wanted(10, 20)).answer_s
    routed(router, "b", 10, 2)
    little = router.foresee(mine, Wanted(10, 20)).answer_s - alone
    assert little == pytest.approx(other.work_s(PRICE))
    routed(router, "b", 10, 2000)
    assert router.foresee(mine, Wanted(10, 20)).answer_s == pytest.approx(2 * alone)
    mine.terms = Terms(claim=Claim(guarantee=0.5))  # and half of the rest
    assert router.foresee(mine, Wanted(10, 20)).answer_s == pytest.approx(alone * (1 + 0.25 / 0.75))


def test_a_request_goes_where_it_ends_first_and_a_late_one_is_refused_with_numbers() -> None:
    router, terms = Router(), Terms(answer_s=1.0)
    first, second = (router.add(place_of("m", group, terms)) for group in range(2))
    assert [routed(router, "m", 10, 30).place for _ in range(4)] == [first, second] * 2
    first.is_open = False
    assert routed(router, "m", 10, 30).place is second
    while isinstance(refused := router.route("m", Wanted(10, 60), 0.0), Ticket):
        pass
    assert isinstance(refused, Refusal) and refused.retry_after_s is not None
    assert "the objective is 1 s" in refused.message and refused.retry_after_s >= 0.1
    router.refuses_late = False
    assert isinstance(router.route("m", Wanted(10, 60), 0.0), Ticket)


def test_the_router_learns_prices_lengths_and_how_late_answers_are() -> None:
    times, draws = StepTimes(), random.Random(0)
    assert not times.is_known and sum(times.price) < 1e-5
    for _ in range(400):
        decodes, prompt = draws.randint(0, 30), draws.choice([0, 0, 40, 300])
        times.saw(decodes, prompt, PRICE.of(1, decodes, prompt) * draws.uniform(0.95, 1.05))
    assert times.price == pytest.approx(PRICE, rel=0.1)
    router = Router()
    place = router.add(place_of("m", 0))
    before = router.foresee(place, Wanted(10, 100)).answer_s
    for number in range(300):  # answers stop after half of what they may, and take twice as long
        ticket = routed(router, "m", 10, 100, number)
        router.heard(ticket, 50, number + 0.1)
        assert router.ended(ticket, number + 2 * ticket.foreseen.work_s)
    assert router.foresee(place, Wanted(10, 200)).answer_s == pytest.approx(2 * before, rel=0.1)
    assert not place.living


def test_what_was_slow_once_is_not_refused_for_ever() -> None:
    """Answers took a hundred times as long while a machine was busy: no refusal outlives that."""
    router = Router()
    place = router.add(place_of("m", 0, Terms(answer_s=0.5)))
    for number in range(50):
        ticket = routed(router, "m", 10, 20, 100.0 * number)
        router.heard(ticket, 20, 100.0 * number + 20)
        router.ended(ticket, 100.0 * number + 100 * ticket.foreseen.work_s)
    assert router.foresee(place, Wanted(10, 20)).answer_s < 0.5  # twice as long, at most
    for _ in range(2000):
        place.times.saw(1, 0, 10.0)  # and steps themselves took seconds
    now_s = 100.0 * 50
    first = routed(router, "m", 10, 20, now_s)  # it is let in to learn from
    assert isinstance(router.route("m", Wanted(10, 20), now_s + 1), Refusal)
    router.ended(first, now_s + 2)
    assert isinstance(router.route("m", Wanted(10, 20), now_s + 3), Refusal)
    assert isinstance(router.route("m", Wanted(10, 20), now_s + 6), Ticket)


def test_all_that_is_sent_is_answered_or_refused_and_refusal_pays_in_overload() -> None:
    terms, trace = {m: Terms(answer_s=1.5) for m in range(3)}, trace_of(60.0, 3)
    attained = {}
    for refuses in (True, False):
        fleet = fleet_of([(0, 1, 2), (0, 1, 2)], terms, refuses_late=refuses)
        records = fleet.run(trace)
        assert {r.state for r in records} <= {State.FINISHED, State.REFUSED}
        assert all(not place.living for place in fleet.router.places)
        attained[refuses] = np.mean([fleet.met(r) for r in records])
    assert attained[True] > attained[False] + 0.1


def test_a_guarantee_keeps_a_quiet_model_in_time_beside_a_burst_of_another() -> None:
    rng = np.random.default_rng(2)
    arrival_s = np.concatenate([np.linspace(0, 10, 400), np.linspace(0.5, 10, 20)])
    model = np.repeat([0, 1], [400, 20])
    order = np.argsort(arrival_s, kind="stable")
    trace = make(
        arrival_s[order], uniform_lengths((5, 60), (30, 40)), rng, model[order], ("a", "b")
    )
    quiet = trace.model == 1

    def attained(claim: Claim) -> float:
        terms = {0: Terms(answer_s=3.0), 1: Terms(answer_s=0.9, claim=claim)}
        fleet = fleet_of([(0, 1)], terms)
        return float(np.mean([fleet.met(r) for r in fleet.run(trace)], where=quiet))

    assert attained(Claim(guarantee=0.7)) == 1.0 > attained(Claim(weight=0.2)) + 0.3


def test_the_same_trace_gives_the_same_records() -> None:
    trace, terms = trace_of(20.0, 2), dict.fromkeys(range(2), Terms(ttft_s=0.3, answer_s=1.0))
    first, second = (fleet_of([(0, 1), (1,)], terms).run(trace) for _ in range(2))
    assert first == second or repr(first) == repr(second)
