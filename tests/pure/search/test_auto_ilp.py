"""The integer programme of strategies = all assignments tried one by one."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from triptych.search.intra.ilp import FIT, Edge, Graph, solve

CASES = 300


def _random_graph(generator: random.Random) -> Graph:
    """A chain with some skips, a few strategies a node; half of them with a tight memory."""
    counts = [generator.randint(1, 4) for _ in range(generator.randint(1, 6))]
    noise = np.random.default_rng(generator.getrandbits(32))
    pairs = [(i, i + 1) for i in range(len(counts) - 1)]
    pairs += [(i, j) for i in range(len(counts)) for j in range(i + 2, len(counts))][::3]
    sizes = [noise.integers(1, 20, n).astype(float) for n in counts]
    limit = float("inf")
    if generator.random() < 0.5:
        least, most = (sum(float(f(own)) for own in sizes) for f in (np.min, np.max))
        limit = least + generator.uniform(-0.1, 0.7) * (most - least + 1)
    return Graph(
        seconds=[noise.integers(0, 30, n) / 1000 for n in counts],
        sizes=sizes,
        edges=[
            Edge(source=i, target=j, seconds=noise.integers(0, 20, (counts[i], counts[j])) / 1000)
            for i, j in pairs
        ],
        limit_bytes=limit,
    )


def _brute_force(graph: Graph) -> float | None:
    choices = product(*(range(len(own)) for own in graph.seconds))
    fitting = (c for c in choices if graph.total_bytes(c) <= FIT * graph.limit_bytes)
    return min(map(graph.total_s, fitting), default=None)


def test_the_programme_equals_brute_force() -> None:
    generator = random.Random(1)
    infeasible = 0
    for _ in range(CASES):
        graph = _random_graph(generator)
        best, choice = _brute_force(graph), solve(graph)
        infeasible += best is None
        assert (choice is None) == (best is None)
        if choice is not None:
            assert graph.total_bytes(choice) <= FIT * graph.limit_bytes
            assert graph.total_s(choice) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert 5 < infeasible < CASES / 4
