"""The parts of a search: splits of layers, and the lazily simulated ranking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import pytest
from search_samples import gpus, tiny, work

from triptych.cluster.cluster import Cluster
from triptych.cost.pipeline import Moment, least_peaks, program_peaks
from triptych.cost.predict import predict
from triptych.cost.pricer import Pricer
from triptych.model.model import Experts, Model
from triptych.plan.plan import even_split
from triptych.plan.rules import verify
from triptych.plan.workload import Workload
from triptych.schedule.generate import build_program
from triptych.schedule.traits import TRAITS
from triptych.search.bounds import SLACK
from triptych.search.branches import Branch, Shape, branches, shapes
from triptych.search.options import Option, rounded
from triptych.search.pins import Pins
from triptych.search.search import search
from triptych.search.space import Space
from triptych.search.splits import balanced_split, part_sums, quantile_split
from triptych.units import GIB


def every_split(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), parts - 1):
        bounds = (0, *cuts, layers)
        yield tuple(bounds[i + 1] - bounds[i] for i in range(parts))


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_part_of_a_balanced_split_is_as_fast_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    layers = [rng.choice([1.0, 1.0, 2.5]) for _ in range(rng.randint(4, 10))]
    parts = rng.randint(2, min(4, len(layers)))
    ends = (rng.uniform(0, 3), rng.uniform(0, 5))
    counts = balanced_split(layers, parts, *ends)
    assert sum(counts) == len(layers)
    assert min(counts) > 0
    least = min(max(part_sums(layers, c, *ends)) for c in every_split(len(layers), parts))
    assert max(part_sums(layers, counts, *ends)) == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_quantiles_of_equal_layers_are_an_even_split(parts: int) -> None:
    counts = quantile_split([1.0] * 16, parts)
    assert sum(counts) == 16
    assert max(counts) - min(counts) <= 1
    assert sorted(counts, reverse=True) == list(even_split(16, parts))


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert balanced_split([1.0] * 12, 3, 0.0, 2.0)[-1] < 4
    assert quantile_split([1.0] * 12, 3, 0.0, 3.0)[-1] < 4


# --- bounds ------------------------------------------------------------------------------------


def every_node(model: Model, cluster: Cluster, workload: Workload) -> Iterator[Node]:
    pins = Pins.read({})
    base = pins.base_plan(model, cluster)
    space = Space(model=model, cluster=cluster, workload=workload, pins=pins, base=base)
    pricer = Pricer(model, cluster, workload)
    for branch in branches(space, pricer):
        for shape in shapes(space, pricer, branch):
            for divided in shape.divided():
                for schedule in shape.schedules:
                    yield branch, shape, shape.option(divided, schedule)


Node = tuple[Branch, Shape, Option]

BOUNDED = {
    "two nodes": (tiny(layers=5), gpus(2, 2), work(4)),
    "heavy ends, tied": (tiny(layers=4, vocab=60_000, tied=True), gpus(1, 4), work(3, 1024)),
    "experts": (tiny(layers=3, experts=Experts(count=2, top_k=1, width=96)), gpus(1, 2), work(4)),
}


@pytest.mark.parametrize("case", BOUNDED.values(), ids=BOUNDED)
def test_no_plan_undercuts_the_bounds_of_the_sets_that_it_is_in(
    case: tuple[Model, Cluster, Workload],
) -> None:
    nodes = list(every_node(*case))
    for branch, shape, option in random.Random(1).sample(nodes, min(len(nodes), 400)):
        step_s, peak_bytes = option.step_s, option.peak_bytes
        for bound_s in (branch.bound.time_s, shape.bound.time_s):
            assert bound_s <= step_s
        assert SLACK * option.bound_s <= step_s
        assert branch.bound.memory_bytes <= peak_bytes
        assert option.least_peak_bytes <= peak_bytes * (1 + 1e-12)
        fitting = shape.within(peak_bytes)
        assert option.schedule in fitting.schedules and option.divided.shard in fitting.shards
        assert shape.within(branch.bound.memory_bytes / 2).num_plans == 0


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_peaks_known_without_a_program_are_ones_that_it_has(name: str) -> None:
    traits = TRAITS[name]
    chunks = [c for c in (1, 2, 3) if traits.allows_chunks(c)]
    for ranks, count, chunk in product(range(1, 6), range(1, 9), chunks):
        if not traits.allows(ranks, count, chunk) or (name == "zb-auto" and ranks * count > 16):
            continue
        peaks = program_peaks(build_program(name, ranks, count, chunk))
        for rank, (least,) in enumerate(least_peaks(name, ranks, count, chunk)):
            assert any(covers(moment, least) for moment in peaks[rank]), (ranks, count, chunk)


def covers(moment: Moment, least: Moment) -> bool:
    return all(a.in_flight >= b.in_flight for a, b in zip(moment, least, strict=True))


def test_few_plans_are_simulated() -> None:
    result = search(tiny(), gpus(2, 4), work(16))
    assert result.simulated < result.legal / 100
    assert sum(result.bounds.values()) + result.simulated == result.legal


def test_an_option_becomes_the_plan_that_was_priced() -> None:
    case = tiny(layers=4), gpus(1, 4), work(4)
    *_, (_, shape, option) = every_node(*case)
    plan = option.plan
    assert not verify(plan, *case)
    assert (plan.stages, plan.chunks) == (shape.frame.stages, shape.frame.chunks)
    prediction = predict(*case, plan)
    assert rounded(prediction.step_time_s) == option.step_s
    assert prediction.peak_memory_gib * GIB == pytest.approx(option.peak_bytes, rel=1e-12)
