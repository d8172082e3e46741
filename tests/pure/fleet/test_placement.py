"""Placements: greedy, beam and small changes against all cases; what does not fit; who needs it."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.errors import InputError
from triptych.fleet.baselines import replaced, replication, round_robin
from triptych.fleet.find import Effort, find, fixed
from triptych.fleet.greedy import beam, best_of_all, fill
from triptych.fleet.judge import Judge
from triptych.fleet.local import Found, anneal
from triptych.fleet.models import Fleet, Served, Shape, evenly, read_shape
from triptych.fleet.partition import alike, buckets, divisions
from triptych.fleet.placement import Group, Placement, empty
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
from triptych.simulate.trace import Trace

PAIR, ONE = Shape(2), Shape(1)


def served(name: str, seconds: float, size: float = 1.0) -> Served:
    profiles = {
        shape: evenly((seconds / shape.devices,) * shape.pipeline, size, shape, 0.01)
        for shape in (ONE, PAIR, Shape(4), Shape(1, 2))
    }
    return Served(name, profiles)


def requests(fleet: Fleet, seed: int, rate: float, slo: float = 5.0, span_s: float = 40) -> Trace:
    """Bursts for all models, objectives as multiples of their latencies."""
    rng = np.random.default_rng(seed)
    shares = power_law_shares(len(fleet.models), 0.5)
    arrival_s, model = draw_models([Window(span_s, rate, 3.0)], shares, rng)
    ones = np.ones(len(model), np.int64)
    alone_s = np.array([m.alone_s for m in fleet.models])
    return Trace(
        arrival_s=arrival_s,
        prompt_tokens=ones,
        output_tokens=ones,
        model=model,
        models=tuple(m.name for m in fleet.models),
        slo_s=slo * alone_s[model],
    )


def small(seed: int) -> tuple[Fleet, Judge]:
    rng = np.random.default_rng(seed)
    models = tuple(served(f"m{i}", float(rng.uniform(0.05, 0.2))) for i in range(4))
    fleet = Fleet(models, 3, device_bytes=2.0, overhead_s=0.01)
    return fleet, Judge(fleet, [requests(fleet, seed, rate=15)])


@pytest.mark.parametrize("seed", range(6))
def test_searches_against_all_cases(seed: int) -> None:
    fleet, judge = small(seed)
    start = empty([PAIR, ONE])
    _, best = best_of_all(start, judge)
    filled = Found(*fill(start, judge))
    annealed = anneal(filled, judge, trials=200)
    for placement, verdict in (filled, beam(start, judge, width=3), annealed):
        placement.check(fleet)
        assert judge.of(placement).attainment == verdict.attainment <= best.attainment
    assert annealed.verdict.attainment >= best.attainment - 0.005
    assert annealed.verdict.attainment >= filled.verdict.attainment


@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_as_good_as_any_shape_and_every_baseline(seed: int) -> None:
    fleet, judge = small(seed)
    found = find(fleet, judge.traces, Effort(trials=100))
    found.placement.check(fleet)
    others = [fixed(fleet, judge.traces, shape, Effort(trials=100)) for shape in (ONE, PAIR)]
    plain = [replication(fleet, judge.traces), round_robin(fleet, PAIR)]
    rivals = [o.verdict.attainment for o in others] + [judge.of(p).attainment for p in plain]
    assert found.verdict.attainment >= max(rivals)
    again = find(fleet, judge.traces, Effort(trials=100))
    assert again.placement == found.placement


def test_what_is_small_is_tried_in_full_and_beams_are_searches_too() -> None:
    fleet, judge = small(0)
    found = find(fleet, judge.traces, Effort(trials=1 << 8, finalists=9))
    small_groups = [p for p in alike(fleet, 3) if len(p.groups) <= 2]
    exact = max(best_of_all(p, judge)[1].attainment for p in small_groups)
    assert found.verdict.attainment >= exact
    by_beam = find(fleet, judge.traces, Effort(trials=20, beam=2))
    by_beam.placement.check(fleet)
    assert judge.of(by_beam.placement).attainment == by_beam.verdict.attainment


def test_long_requests_get_devices_of_their_own() -> None:
    """A convoy: one long request before ten short ones makes all ten late."""
    models = (*(served(f"short{i}", 0.05) for i in range(3)), served("long", 1.0))
    fleet = Fleet(models, 4, device_bytes=4.0)
    together, *apart = buckets(fleet)
    assert (together, apart) == (((0, 1, 2, 3),), [((0, 1, 2), (3,))])
    judge = Judge(fleet, [requests(fleet, 1, rate=8, slo=3.0)])
    found = find(fleet, judge.traces, Effort(trials=100))
    assert any(group.models and 3 not in group.models for group in found.placement.groups)
    mixed = [fill(groups, judge)[1].attainment for groups in alike(fleet, 4)]
    assert found.verdict.attainment > max(mixed)


def test_models_too_large_are_refused_with_bytes() -> None:
    fleet = Fleet((served("big", 1.0, size=20 * 2**30), served("small", 1.0)), 2, 9 * 2**30)
    with pytest.raises(InputError, match=r"big: 10\.00 GiB on a device(.|\n)*9\.00 GiB"):
        fleet.check()
    with pytest.raises(InputError, match=r"groups of 4 devices(.|\n)*group 0: 20\.00 GiB"):
        Placement((Group(ONE, frozenset({0})), Group(Shape(3)))).check(fleet)


def test_replacement_plans_on_the_window_before() -> None:
    """Traffic that moves from one model to the other: only a clairvoyant plan is ready for it."""
    fleet = Fleet((served("a", 0.1), served("b", 0.1)), 1, device_bytes=1.0)
    times = np.arange(0, 20, 0.5)
    ones = np.ones(len(times), np.int64)
    trace = Trace(
        arrival_s=times,
        prompt_tokens=ones,
        output_tokens=ones,
        model=(times >= 10).astype(np.int64),
        models=("a", "b"),
        slo_s=np.full(len(times), 1.0),
    )
    assert replaced(fleet, trace, 10, clairvoyant=True).attainment == 1.0
    assert replaced(fleet, trace, 10).attainment == 0.5
    assert replaced(fleet, trace, 5).attainment == 0.75


def test_devices_are_cut_without_rest() -> None:
    fleet = Fleet((served("m", 0.1),), 7, device_bytes=1.0)
    cuts = [tuple(map(str, p.shapes.elements())) for p in alike(fleet, 7)]
    assert cuts == [("1x1",) * 7, *cuts[1:]]
    assert all(p.num_devices == 7 for p in alike(fleet, 7))
    assert ("4x1", "2x1", "1x1") in cuts
    assert set(divisions(np.array([1.0, 3.0]), 8, 1)) == {(1, 7), (2, 6), (3, 5)}


def test_shapes_read() -> None:
    assert read_shape("4x2") == Shape(4, 2)
    for text in ("4", "0x1", "axb", "1x2x3"):
        with pytest.raises(InputError, match="PIPELINExTENSOR"):
            read_shape(text)
