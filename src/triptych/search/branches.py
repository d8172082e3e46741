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
from triptych.cost.memory import room_bytes
from triptych.cost.pipeline import Pair, pipeline_bound_s, rank_bounds_s
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
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
    frame: Frame  # the stages with their costs
    schedules: tuple[str, ...]
    shards: tuple[Shard, ...]

    @property
    def degrees(self) -> Degrees:
        """The degrees of all its plans."""
        return self.branch.family.degrees

    @property
    def num_plans(self) -> int:
        """Plans in it."""
        return len(self.schedules) * len(self.shards)

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
        frame, states = self.frame, self.branch.family.states
        for shard in self.shards:
            key = (*self._key(shard.storage), frame.distinct)
            if key not in states:
                states[key] = frame.state(shard.storage)
            yield Divided(frame=frame, shard=shard, state=states[key])

    def within(self, limit_bytes: float) -> Shape:
        """Without the schedules and ways to divide state with which the first rank cannot fit."""
        room = _room_bytes(self.frame, limit_bytes)
        states = [self._first_state(shard.storage) for shard in self.shards]
        works = [self.frame.least_work(name, (0,))[0] for name in self.schedules]
        beside, least = room - min(states), room - min(works)
        return Shape(
            branch=self.branch,
            frame=self.frame,
            schedules=tuple(
                name for name, work in zip(self.schedules, works, strict=True) if work <= beside
            ),
            shards=tuple(
                shard for shard, state in zip(self.shards, states, strict=True) if state <= least
            ),
        )

    def _first_state(self, storage: Storage) -> float:
        """Bytes of state on the first pipeline rank."""
        states, key = self.branch.family.states, self._key(storage)
        if key not in states:
            states[key] = self.frame.state(storage, (0,))
        return states[key][0]

    def _key(self, storage: Storage) -> tuple[object, ...]:
        return storage, id(self.frame.stages), self.frame.is_v_shaped

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
                settings = (branch.setting,) * len(stages)
                built = (chunks, is_v_shaped, branch.num_microbatches)
                frame = Frame.build(pricer, stages, settings, *built)
                yield Shape(branch=branch, frame=frame, schedules=schedules, shards=branch.shards)


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
    whole = branch.whole
    room = _room_bytes(whole, limit_bytes) - least_work(whole, branch.degrees.pp)
    fits = tuple(shard for shard in branch.shards if shard.least_bytes <= room)
    return replace(branch, shards=fits)


def _room_bytes(frame: Frame, limit_bytes: float) -> float:
    """Room for tensors, a little too large: see `SLACK`."""
    return room_bytes(limit_bytes / SLACK, frame.footprint, frame.is_cpu)
