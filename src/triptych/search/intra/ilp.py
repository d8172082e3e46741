"""One strategy for every operator of a graph, at the least cost: an exact integer programme.

    minimise    sum_v s_v . seconds_v  +  sum_(v,u) e_vu . seconds_vu
    subject to  s_v one-hot, sum_v s_v . bytes_v <= limit
                rows of e_vu sum to s_v, columns to s_u

With both marginals fixed, e_vu is 1 where both ends chose and 0 elsewhere, so that only the s_v
need to be integers. Source: Zheng et al. 2022, "Alpa", sec. 4.2, eq. 1, solved by HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Array = NDArray[np.float64]

FIT = 1 + 1e-9
"""Bytes equal to the limit fit, whatever the order in which they were added."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A tensor from one node to another: `seconds[i, j]` if they choose strategies i and j."""

    source: int
    target: int
    seconds: Array


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes with strategies: seconds (inf: impossible) and bytes of each, the edges between."""

    seconds: Sequence[Array]
    sizes: Sequence[Array]  # bytes
    edges: Sequence[Edge]
    limit_bytes: float = float("inf")

    def total_s(self, choice: Sequence[int]) -> float:
        """Seconds of one strategy a node."""
        nodes = sum(float(own[i]) for own, i in zip(self.seconds, choice, strict=True))
        ends = ((edge, choice[edge.source], choice[edge.target]) for edge in self.edges)
        return nodes + sum(float(edge.seconds[i, j]) for edge, i, j in ends)

    def total_bytes(self, choice: Sequence[int]) -> float:
        """Bytes of one strategy a node."""
        return sum(float(own[i]) for own, i in zip(self.sizes, choice, strict=True))


def solve(graph: Graph) -> tuple[int, ...] | None:
    """The strategies that take least time among those that fit; None if none do."""
    least_bytes = sum(float(own.min()) for own in graph.sizes)
    if least_bytes > FIT * graph.limit_bytes:
        return None
    starts = _starts([len(own) for own in graph.seconds])
    edge_starts = _starts([edge.seconds.size for edge in graph.edges], starts[-1])
    costs = np.concatenate(
        [*graph.seconds, *(edge.seconds.ravel() for edge in graph.edges), np.zeros(0)]
    )
    possible = np.isfinite(costs)
    scale = float(np.abs(costs[possible]).max()) or 1.0
    found = milp(
        np.where(possible, costs, 0.0) / scale,
        constraints=_constraints(graph, starts, edge_starts),
        integrality=(np.arange(len(costs)) < starts[-1]).astype(int),
        bounds=Bounds(0.0, possible.astype(float)),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return tuple(int(np.argmax(found.x[a:b])) for a, b in pairwise(starts))


def _starts(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Where each part of a vector starts, and where the last one ends."""
    return [first, *(first + int(end) for end in np.cumsum(sizes))]


def _constraints(
    graph: Graph, starts: Sequence[int], edge_starts: Sequence[int]
) -> list[LinearConstraint]:
    """One strategy a node, edges that agree with their ends, the memory."""
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    right: list[float] = []
    for node, (a, b) in enumerate(pairwise(starts)):
        rows += [node] * (b - a)
        columns += range(a, b)
        values += [1.0] * (b - a)
        right.append(1.0)
    for edge, first in zip(graph.edges, edge_starts[:-1], strict=True):
        index = first + np.arange(edge.seconds.size).reshape(edge.seconds.shape)
        for end, lines in ((edge.source, index), (edge.target, index.T)):
            for strategy, line in enumerate(lines):
                rows += [len(right)] * (len(line) + 1)
                columns += [*line.tolist(), starts[end] + strategy]
                values += [1.0] * len(line) + [-1.0]
                right.append(0.0)
    shape = (len(right), edge_starts[-1])
    found = [LinearConstraint(csr_array((values, (rows, columns)), shape=shape), right, right)]
    if np.isfinite(graph.limit_bytes):
        found.append(_memory(graph, shape[1]))
    return found


def _memory(graph: Graph, width: int) -> LinearConstraint:
    sizes = np.zeros(width)
    together = np.concatenate(list(graph.sizes))
    scale = max(graph.limit_bytes, float(together.max()), 1.0)
    sizes[: len(together)] = together / scale
    line: Any = sizes.reshape(1, -1)
    return LinearConstraint(line, -np.inf, FIT * graph.limit_bytes / scale)
