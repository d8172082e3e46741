"""Sets of plans, each with a bound: all plans of some degrees and settings, then their pipelines.

branch    degrees, micro-batch, recomputation, sequence parallelism, ...     bound: `branch_bound`
shape     + layers of the stages, chunks, loop or V                          bound: the pipeline
option    + schedule, ZeRO                                                   bound: the step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from triptych.cost.frame import Frame
from triptych.cost.pipeline import Pair, pipeline_bound_s, rank_bounds_s
from triptych.cost.pricer import Pricer
from triptych.cost.setting import PieceCost, Setting
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan, Stage
from triptych.schedule.traits import TRAITS
from triptych.search.bounds import (
    SLACK,
    Bound,
    least_peak,
    least_state,
    least_time,
    least_work,
    whole_model,
)
from triptych.search.options import Divided, Option, Shard
from triptych.search.space import Degrees, Space
from triptych.search.splits import layer_splits

Splits = dict[int, tuple[tuple[Stage, ...], ...]]
"""Stages by chunks: every way in which the layers are dealt."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all plans with some degrees share."""

    degrees: Degrees
    splits: Splits
    states: dict[tuple[object, ...], list[float]]  # bytes of state, by what they depend on


@dataclass(frozen=True, kw_only=True)
class Branch:
    """All plans with some degrees and settings."""

    family: Family
    plan: Plan  # one stage, one chunk
    whole: Frame  # that stage
    num_microbatches: int
    shards: tuple[Shard, ...]
    num_pipelines: int  # schedules on stages
    bound: Bound

    @property
    def setting(self) -> Setting:
        """The setting of all its plans."""
        return self.whole.settings[0]

    @property
    def num_plans(self) -> int:
        """Plans in it."""
        return self.num_pipelines * len(self.shards)

    @property
    def degrees(self) -> Degrees:
        """The degrees of all its plans."""
        return self.family.degrees


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The plans of a branch that share their stages and where these run."""

    branch: Branch
    stages: tuple[Stage, ...]
    chunks: int
    is_v_shaped: bool
    schedules: tuple[str, ...]
    pricer: Pricer

    @property
    def degrees(self) -> Degrees:
        """The degrees of all its plans."""
        return self.branch.family.degrees

    @property
    def num_plans(self) -> int:
        """Plans in it."""
        return len(self.schedules) * len(self.branch.shards)

    @cached_property
    def frame(self) -> Frame:
        """The stages with their costs."""
        settings = (self.branch.setting,) * len(self.stages)
        shape = (self.chunks, self.is_v_shaped, self.branch.num_microbatches)
        return Frame.build(self.pricer, self.stages, settings, *shape)

    @cached_property
    def rough_bound(self) -> Bound:
        """What the last pipeline rank takes at least, by counts of layers alone."""
        branch, ranks = self.branch, self.degrees.pp
        layers_s = [
            piece.forward.total_s + min(piece.backward.total_s, piece.split_input_s)
            for piece in self._pieces()
        ]
        mine = self.stages[ranks - 1 :: ranks]
        if self.is_v_shaped:
            mine = self.stages[ranks - 1 : ranks + 1]
        work = branch.num_microbatches * sum(stage.num_layers for stage in mine)
        time_s = (self.stages[ranks - 1].start + work) * min(layers_s)
        return Bound(max(branch.bound.time_s, SLACK * time_s), branch.bound.memory_bytes)

    def _pieces(self) -> Iterator[PieceCost]:
        """The layers of the model under the branch's setting."""
        setting = self.branch.setting
        for kind in range(len(self.pricer.kinds)):
            yield self.pricer.piece(kind, setting)
            if setting.recompute_every > 1:
                yield self.pricer.piece(kind, setting.kept)

    @cached_property
    def bound(self) -> Bound:
        """No schedule runs these stages in less time; memory is the branch's."""
        frame = self.frame
        pairs: list[Pair] = [(cost.forward_s, cost.backward_s) for cost in frame.costs]
        halves: list[Pair] | None = None
        if any(TRAITS[name].splits_backward for name in self.schedules):
            halves = [(cost.input_s, cost.weight_s) for cost in frame.costs]
            pairs = [(f, min(b, i + w)) for (f, b), (i, w) in zip(pairs, halves, strict=True)]
        program = (frame.placement, frame.num_microbatches, frame.hop_s)
        way_s = pipeline_bound_s(pairs, halves, *program)
        time_s = max(way_s, *rank_bounds_s(pairs, *program))
        return Bound(max(self.branch.bound.time_s, SLACK * time_s), self.branch.bound.memory_bytes)

    def divided(self) -> Iterator[Divided]:
        """Its frame under every way to divide state."""
        states = self.branch.family.states
        for shard in self.branch.shards:
            key = (shard.storage, id(self.stages), self.is_v_shaped, self.frame.distinct)
            if key not in states:
                states[key] = self.frame.state(shard.storage)
            yield Divided(frame=self.frame, shard=shard, state=states[key])

    def option(self, divided: Divided, schedule: str) -> Option:
        """One of its plans."""
        return Option(
            degrees=self.degrees, base=self.branch.plan, divided=divided, schedule=schedule
        )


def branches(space: Space, pricer: Pricer) -> Iterator[Branch]:
    """Every legal plan of a space, in sets."""
    for degrees in space.degrees():
        family: Family | None = None
        shards: dict[str, tuple[Shard, ...]] = {}
        for plan in space.settings(degrees):
            setting = Setting.of(plan)
            whole = whole_model(pricer, plan, setting)
            family = family or _family(space, pricer, degrees, setting)
            if plan.offload not in shards:
                shards[plan.offload] = tuple(_shards(space, degrees, plan, whole))
            yield _branch(space, family, plan, whole, shards[plan.offload])


def shapes(space: Space, pricer: Pricer, branch: Branch) -> Iterator[Shape]:
    """The plans of a branch by pipeline: loops and Vs apart."""
    for chunks, splits in branch.family.splits.items():
        names = space.schedules(branch.degrees, branch.plan.microbatch, chunks)
        for is_v_shaped in (False, True):
            schedules = tuple(n for n in names if TRAITS[n].is_v_shaped == is_v_shaped)
            for stages in splits if schedules else ():
                yield Shape(
                    branch=branch,
                    stages=stages,
                    chunks=chunks,
                    is_v_shaped=is_v_shaped,
                    schedules=schedules,
                    pricer=pricer,
                )


def _family(space: Space, pricer: Pricer, degrees: Degrees, setting: Setting) -> Family:
    splits = {c: _splits(space, pricer, degrees, setting, c) for c in space.chunks(degrees)}
    return Family(degrees=degrees, splits=splits, states={})


def _splits(
    space: Space, pricer: Pricer, degrees: Degrees, setting: Setting, chunks: int
) -> tuple[tuple[Stage, ...], ...]:
    layers = space.pins.layers
    counts = (layers,) if layers else layer_splits(pricer, setting, degrees.pp * chunks)
    return tuple(space.stages(degrees, chunks, one) for one in counts)


def _shards(space: Space, degrees: Degrees, plan: Plan, whole: Frame) -> Iterator[Shard]:
    for sharding in space.shardings(degrees):
        storage = Storage.of(plan.with_(**sharding._asdict()))
        yield Shard(sharding, storage, least_state(whole, storage, degrees.pp))


def _branch(
    space: Space, family: Family, plan: Plan, whole: Frame, shards: tuple[Shard, ...]
) -> Branch:
    degrees = family.degrees
    count = space.workload.global_batch // (degrees.dp * plan.microbatch)
    state_bytes = min(shard.least_bytes for shard in shards)
    return Branch(
        family=family,
        plan=plan,
        whole=whole,
        num_microbatches=count,
        shards=shards,
        num_pipelines=sum(
            len(splits) * len(space.schedules(degrees, plan.microbatch, chunks))
            for chunks, splits in family.splits.items()
        ),
        bound=Bound(
            least_time(whole, count, degrees.pp),
            least_peak(whole, state_bytes, least_work(whole, degrees.pp)),
        ),
    )


def within(branch: Branch, limit_bytes: float) -> Branch:
    """A branch without the ways to divide state that cannot fit."""
    if branch.bound.memory_bytes > limit_bytes:
        return replace(branch, shards=())
    whole, work_bytes = branch.whole, least_work(branch.whole, branch.degrees.pp)
    fits = [
        shard
        for shard in branch.shards
        if least_peak(whole, shard.least_bytes, work_bytes) <= limit_bytes
    ]
    return replace(branch, shards=tuple(fits))
