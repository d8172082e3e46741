"""The layout of every operator of a stage: what the plan does, beside the best there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from triptych.cost.frame import Frame
from triptych.cost.memory import room_bytes
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan
from triptych.search.intra.block import Layer
from triptych.search.intra.found import Axis, Layout
from triptych.search.intra.ilp import Array, Edge, Graph, solve
from triptych.search.intra.roles import best_with, named, stage_axes

CLOSE = 1e-6
"""Layouts whose seconds differ by less are equally good."""


def layouts(pricer: Pricer, plan: Plan) -> tuple[Layout, ...]:
    """The layout of each kind of layer on each kind of stage, beside the best: each solved once.

    Layers that a plan divides in a way that no operator's strategies say (rings of more ranks than
    there are heads) are left out.
    """
    frame = Frame.of(pricer, plan)
    first: dict[Any, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        own = frame.pricers[index]
        for kind in sorted({own.kind_of_layer[n] for n in range(stage.start, stage.stop)}):
            key = (kind, stage_axes(plan, stage), id(own), frame.settings[index])
            first.setdefault(key, []).append(index)
    found = (
        _layout(frame, plan, kind, axes, tuple(stages))
        for (kind, axes, _, _), stages in first.items()
    )
    return tuple(layout for layout in found if layout)


def layer_of(
    frame: Frame, plan: Plan, kind: int, axes: Sequence[Axis], index: int
) -> tuple[Layer, float]:
    """A kind of layer on a stage's mesh, and the bytes that each of the stage's layers may have.

    The fullest stage of those that are alike counts: the first, with most micro-batches in flight.
    """
    own, cost = frame.pricers[index], frame.costs[index]
    moments = frame.peaks(plan.schedule)[frame.placement[index]]
    in_flight = max(sum(alive.in_flight for alive in moment) for moment in moments)
    layer = Layer(
        pricer=own,
        block=own.kinds[kind],
        axes=tuple(axis.size for axis in axes),
        rows=plan.round_rows,
        num_microbatches=frame.num_microbatches,
        setting=frame.settings[index],
        storage=frame.storage(Storage.of(plan), index),
        in_flight=in_flight,
    )
    room = room_bytes(own.memory_limit_bytes, frame.footprint, frame.is_cpu)
    left = room - cost.working_bytes - cost.logits_bytes
    held = sum(frame.stages[stage].num_layers for stage in frame.stages_of(frame.placement[index]))
    return layer, left / held


def _layout(
    frame: Frame, plan: Plan, kind: int, axes: tuple[Axis, ...], stages: tuple[int, ...]
) -> Layout | None:
    layer, limit_bytes = layer_of(frame, plan, kind, axes, stages[0])
    graph = layer.graph(limit_bytes)
    planned = restricted(graph, best_with(layer, [axis.role for axis in axes]))
    if planned is None:
        return None
    best = solve(graph)
    if best is None or graph.total_s(best) >= graph.total_s(planned) * (1 - CLOSE):
        best = planned
    return Layout(
        stages=stages,
        kind=kind,
        axes=axes,
        operators=tuple(_words(layer, planned)),
        seconds=graph.total_s(planned),
        best=tuple(_words(layer, best)),
        best_s=graph.total_s(best),
        roles=named(layer, best),
    )


def _words(layer: Layer, choice: Sequence[int]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for op, strategies, index in zip(layer.operators, layer.strategies, choice, strict=True):
        yield op.name, tuple(mode.name for mode in strategies[index])


def restricted(graph: Graph, allowed: Sequence[Sequence[int]] | None) -> tuple[int, ...] | None:
    """The best choice among some strategies of each node, whatever memory it needs."""
    if allowed is None:
        return None
    narrow = Graph(
        seconds=[own[list(a)] for own, a in zip(graph.seconds, allowed, strict=True)],
        sizes=[own[list(a)] for own, a in zip(graph.sizes, allowed, strict=True)],
        edges=[
            Edge(source=e.source, target=e.target, seconds=_part(e.seconds, allowed, e))
            for e in graph.edges
        ],
    )
    found = solve(narrow)
    return found and tuple(a[i] for a, i in zip(allowed, found, strict=True))


def _part(seconds: Array, allowed: Sequence[Sequence[int]], edge: Edge) -> Array:
    part: Array = seconds[np.ix_(list(allowed[edge.source]), list(allowed[edge.target]))]
    return part
