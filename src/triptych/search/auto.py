"""Plans whose stages have layers, submeshes and degrees of their own, found automatically.

For every set of shared settings that could be better than the best plan so far, the dynamic
programme (`inter/dp.py`) deals layers to submeshes; what it finds is simulated under every schedule
that has a program for it, and held to the memory of each device. The start is the best uniform
plan, so that the answer is never worse. Source: Zheng et al. 2022, "Alpa", sec. 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.step import Priced, step_bound_s, step_seconds
from triptych.cost.storage import Storage
from triptych.errors import PlanError, Problem
from triptych.model.model import Block, Model
from triptych.model.operators import block_operators
from triptych.plan.plan import Plan
from triptych.plan.rules import verify
from triptych.plan.workload import Workload
from triptych.search.decisions import fits
from triptych.search.inter.assemble import assembled, scheduled
from triptych.search.inter.dp import Option, Stages
from triptych.search.inter.price import Units, undominated
from triptych.search.inter.rounds import Place, Round, places, rounds, suits, unsupported
from triptych.search.space import Space
from triptych.search.splits import balanced_split

MOST_UNITS = 48
"""Layers, or clusters of layers of about equal seconds, that stages are made of."""

FILLS = (0.25, 1.0)
"""Weights of the pipeline's filling: of several chunks a rank, and of one; what the first cannot
keep to, the second cannot either."""

ZEROS = (0, 1, 3)
"""ZeRO-2 has the messages of 3 and the weights of 1: uniform plans try it, stages do not."""

CLOSE = 1 - 1e-9

SLACK = 0.98
"""The bound shares out the ends of the model as if they were layers."""

ROOM = (1.0, 0.95, 0.88)
"""Parts of the memory that stages are dealt for, one after the other until the plan fits."""


class Timed(NamedTuple):
    """A plan and its simulated step time."""

    step_s: float
    plan: Plan


@dataclass(kw_only=True)
class Stager:
    """A search for stages below `best_s` seconds; `found` are the plans, each better than before.

    `looked_into` counts the sets of shared settings that no bound passed over.
    """

    space: Space
    pricer: Pricer
    best_s: float = float("inf")
    found: list[Timed] = field(default_factory=list)
    looked_into: int = 0

    def check(self) -> None:
        """Raises PlanError for pins that stages of their own cannot keep."""
        if problems := unsupported(self.space.pins):
            rule = "stages of their own are found, so these settings are not fixed"
            raise PlanError(Problem(", ".join(problems), rule, "leave them out"))

    def run(self) -> Timed | None:
        """The best plan; None if none is better than `best_s`."""
        units = Units(space=self.space, pricer=self.pricer, bounds=unit_bounds(self.pricer))
        groups = range(len(self.space.cluster.groups))
        every = [place for index in groups for place in places(self.space, index)]
        for bound_s, shared in sorted(_bounded(units, every)):
            if bound_s >= self.best_s:
                break
            self.looked_into += 1
            for zero in self.space.pins.choices("zero", ZEROS):
                self._deal(units, every, shared, zero)
        return self.found[-1] if self.found else None

    def _deal(self, units: Units, every: Sequence[Place], shared: Round, zero: int) -> None:
        """Deals layers to submeshes, for one chunk a rank and for several."""
        fitting = [place for place in every if suits(self.space, place, shared)]
        clusters = [(place, units.clusters(place, shared, zero)) for place in fitting]
        priced = undominated([(place, own) for place, own in clusters if own is not None])
        for fill in FILLS:
            if not self._fill(units, priced, shared, zero, fill):
                break

    def _fill(
        self,
        units: Units,
        priced: Sequence[tuple[Place, Option]],
        shared: Round,
        zero: int,
        fill: float,
    ) -> bool:
        """Tries the best stages in all of the memory, or in less; False if there are none."""
        for room in ROOM:
            pipeline = self._stages(units, priced, shared, fill, room).best(self.best_s)
            if pipeline is None:
                return room < 1.0
            spans = [
                (units.bounds[span.start], units.bounds[span.stop], priced[span.option][0])
                for span in pipeline.stages
            ]
            if self._try(assembled(self.space, shared, zero, spans)):
                break
        return True

    def _stages(
        self,
        units: Units,
        priced: Sequence[tuple[Place, Option]],
        shared: Round,
        fill: float,
        room: float,
    ) -> Stages:
        return Stages(
            num_layers=units.number,
            devices=tuple(group.num_devices for group in self.space.cluster.groups),
            num_microbatches=self.space.workload.global_batch // shared.rows,
            options=[option for _, option in priced],
            fill=fill,
            room=room,
        )

    def _try(self, plan: Plan) -> bool:
        """Simulates a plan under every schedule; True if it fits under one."""
        asked = self.space.model, self.space.cluster, self.space.workload
        has_fit = False
        for chosen in scheduled(self.space, plan):
            if verify(chosen, *asked):
                continue
            if not fits(self.pricer, chosen, self.space.spare):
                continue
            has_fit = True
            frame, storage = Frame.of(self.pricer, chosen), Storage.of(chosen)
            priced = Priced.of(frame, storage)
            if step_bound_s(frame, priced, chosen.schedule) >= self.best_s * CLOSE:
                continue
            step_s = step_seconds(frame, priced, chosen.schedule)
            if step_s < self.best_s * CLOSE:
                self.best_s = step_s
                self.found.append(Timed(step_s, chosen))
        return has_fit


def unit_bounds(pricer: Pricer) -> tuple[int, ...]:
    """Layers in at most `MOST_UNITS` clusters whose slowest is as fast as can be."""
    layers = pricer.model.num_layers
    if layers <= MOST_UNITS:
        return tuple(range(layers + 1))
    flops = [layer_flops(pricer.model, block, pricer.workload) for block in pricer.model.blocks]
    return (0, *accumulate(balanced_split(flops, MOST_UNITS)))


def layer_flops(model: Model, block: Block, workload: Workload) -> float:
    """Forward FLOPs of a layer, per token."""
    operators = block_operators(model, block)
    return sum(op.forward_flops(workload.sequence_length) for op in operators)


def _bounded(units: Units, every: Sequence[Place]) -> Iterator[tuple[float, Round]]:
    """Shared settings with about the least time that stages could take with them.

    All devices together do the layers at the rates of the best degrees in each group.
    """
    space = units.space
    for shared in rounds(space):
        rates = [0.0] * len(space.cluster.groups)
        for place in every:
            if suits(space, place, shared):
                rate = 1.0 / (place.num_devices * units.at(place, shared).passes_s)
                rates[place.group] = max(rates[place.group], rate)
        groups = zip(space.cluster.groups, rates, strict=True)
        together = sum(group.num_devices * rate for group, rate in groups)
        if together:
            yield SLACK * space.workload.global_batch / shared.rows / together, shared
