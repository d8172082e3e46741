"""The parts of a search: splits of layers, and the lazily simulated ranking."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from search_samples import gpus, tiny, work

from triptych.cost.pricer import Pricer
from triptych.plan.plan import Plan, even_split
from triptych.search.options import walk
from triptych.search.pins import Pins
from triptych.search.rank import Contender, best, ranked, rounded
from triptych.search.space import Space
from triptych.search.splits import balanced_split, part_sums, quantile_split


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


def contenders(model_layers: int = 6) -> list[Contender]:
    model, cluster, workload = tiny(layers=model_layers), gpus(1, 4), work(8)
    pins = Pins.read({})
    base = pins.base_plan(model, cluster)
    space = Space(model=model, cluster=cluster, workload=workload, pins=pins, base=base)
    options = walk(space, Pricer(model, cluster, workload)).options
    return [Contender(option, base, lambda plan: True) for option in options]


def test_lazy_ranking_is_sorting_by_simulated_time() -> None:
    lazy = [c.order for c in best(contenders(), 25)]
    eager = sorted(c.order for c in contenders())[:25]
    assert lazy == eager


def test_lazy_ranking_simulates_few_options() -> None:
    everything = contenders()
    best(everything, 3)
    simulated = sum("step_s" in vars(contender) for contender in everything)
    assert simulated < len(everything) / 4


def test_every_bound_is_below_its_simulated_time() -> None:
    for contender in contenders(5):
        assert rounded(contender.option.bound_s) <= contender.step_s


def test_leaders_are_one_for_each_set_of_degrees() -> None:
    chosen = ranked(contenders(), 4)
    assert len({contender.option.degrees for contender in chosen}) == 4
    assert [c.order for c in chosen] == sorted(c.order for c in chosen)


def test_an_option_becomes_the_plan_that_was_priced() -> None:
    contender = contenders()[0]
    plan = contender.plan
    assert isinstance(plan, Plan)
    assert plan.microbatch == contender.option.frame.settings[0].microbatch
    assert plan.zero == contender.option.storage.zero
