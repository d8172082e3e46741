"""The dynamic programme of stages = all stages tried one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from triptych.search.inter.dp import FIT, Option, Pipeline, Span, Stages

CASES = 300


def _random_stages(generator: random.Random) -> Stages:
    """Up to 5 layers of their own seconds, one or two groups of devices, sometimes too little."""
    layers = generator.randint(1, 5)
    devices = tuple(generator.randint(1, 4) for _ in range(generator.choice((1, 1, 2))))
    noise = np.random.default_rng(generator.getrandbits(32))
    options = []
    for _ in range(generator.randint(1, 4)):
        group = generator.randrange(len(devices))
        taken = [generator.randint(1, 2) * (g == group) for g in range(len(devices))]
        seconds = noise.integers(1, 12, (layers, layers)) / 100
        seconds[noise.random(seconds.shape) < 0.1] = np.inf
        options.append(
            Option(
                devices=tuple(taken),
                seconds=seconds,
                state_bytes=noise.integers(1, 8, seconds.shape).astype(float),
                flight_bytes=noise.integers(0, 3, seconds.shape).astype(float),
                limit_bytes=float(generator.choice((6, 10, 100))),
            )
        )
    return Stages(
        num_layers=layers,
        devices=devices,
        num_microbatches=generator.choice((1, 2, 5, 40)),
        options=options,
        fill=generator.choice((1.0, 1.0, 0.25)),
    )


def _all(asked: Stages) -> Iterator[Pipeline]:
    """Every pipeline that uses all layers and devices and fits."""
    layers = asked.num_layers
    for cuts in (c for n in range(layers) for c in combinations(range(1, layers), n)):
        bounds = [0, *cuts, layers]
        for chosen in product(range(len(asked.options)), repeat=len(cuts) + 1):
            stages = [Span(a, b, o) for a, b, o in zip(bounds, bounds[1:], chosen, strict=False)]
            pipeline = _priced(asked, stages)
            if pipeline:
                yield pipeline


def _priced(asked: Stages, stages: list[Span]) -> Pipeline | None:
    used = np.sum([asked.options[stage.option].devices for stage in stages], axis=0)
    if tuple(used) != asked.devices:
        return None
    seconds = []
    for behind, (start, stop, index) in enumerate(reversed(stages)):
        option, at = asked.options[index], (stop - start - 1, start)
        flight = min(asked.num_microbatches, behind + 1) * option.flight_bytes[at]
        if option.state_bytes[at] + flight > FIT * option.limit_bytes:
            return None
        seconds.append(float(option.seconds[at]))
    if max(seconds) == float("inf"):
        return None
    return Pipeline(tuple(stages), sum(seconds), max(seconds))


def test_the_programme_equals_brute_force() -> None:
    generator = random.Random(2)
    infeasible = several = 0
    for _ in range(CASES):
        asked = _random_stages(generator)
        best_s = min(map(asked.objective_s, _all(asked)), default=None)
        found = asked.best()
        infeasible += best_s is None
        assert (found is None) == (best_s is None)
        if found is None or best_s is None:
            continue
        several += len(found.stages) > 1
        again = _priced(asked, list(found.stages))
        assert again is not None, "the stages fit and use everything"
        assert found.sum_s == pytest.approx(again.sum_s) and found.slowest_s == again.slowest_s
        assert asked.objective_s(found) == pytest.approx(best_s, rel=1e-12)
        assert asked.best(below_s=best_s * (1 + 1e-9)) is not None
        assert asked.best(below_s=best_s * (1 - 1e-9)) is None
    assert infeasible < CASES / 2 and several > CASES / 4
