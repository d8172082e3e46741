"""A plan of the space as the search handles it: priced far enough to be ranked, then exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.step import Priced, step_bound_s, step_seconds
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan
from triptych.search.space import Degrees, Sharding

FIT = 1 + 1e-9
"""A peak equal to the limit fits, whatever the order in which its terms were added."""

Order = tuple[object, ...]


class Shard(NamedTuple):
    """A way to divide the state of some degrees."""

    sharding: Sharding
    storage: Storage
    least_bytes: float  # of state, on the fullest pipeline rank


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A frame under one way to divide its state: what its schedules share."""

    frame: Frame
    shard: Shard
    state: Sequence[float]  # bytes by kind of rank

    @cached_property
    def priced(self) -> Priced:
        """Seconds of stages and of ends of step."""
        return Priced.of(self.frame, self.shard.storage)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One plan. Its bounds are cheap; its peak and its step time are made when they are asked for.

    `base` holds every setting but stages, chunks, schedule and sharding.
    """

    degrees: Degrees
    base: Plan
    divided: Divided
    schedule: str

    @cached_property
    def plan(self) -> Plan:
        """The plan itself."""
        frame = self.divided.frame
        return self.base.with_(
            stages=frame.stages,
            chunks=frame.chunks,
            schedule=self.schedule,
            **self.divided.shard.sharding._asdict(),
        )

    @cached_property
    def bound_s(self) -> float:
        """The step takes at least this long."""
        return step_bound_s(self.divided.frame, self.divided.priced, self.schedule)

    @cached_property
    def least_peak_bytes(self) -> float:
        """The largest rank needs at least this."""
        frame = self.divided.frame
        return frame.peak_bytes(self.divided.state, frame.least_work(self.schedule))

    @cached_property
    def peak_bytes(self) -> float:
        """The peak of the largest rank."""
        frame = self.divided.frame
        return frame.peak_bytes(self.divided.state, frame.work(self.schedule))

    @cached_property
    def step_s(self) -> float:
        """The simulated step time, to nine digits: what is nearer together is equal."""
        divided = self.divided
        return rounded(step_seconds(divided.frame, divided.priced, self.schedule))

    @cached_property
    def simplicity(self) -> Order:
        """What breaks ties: fewer pipeline, tensor, context and expert ranks, a lower ZeRO stage,
        nothing recomputed, no sequence parallelism, a ring, a smaller micro-batch, 1F1B; last, the
        layers of the stages.
        """
        degrees, plan, sharding = self.degrees, self.base, self.divided.shard.sharding
        return (
            (degrees.pp, degrees.tp, degrees.cp, degrees.ep),
            (sharding.zero, sharding.hybrid_shard, sharding.accumulation != "auto"),
            (plan.recompute != "none", plan.recompute, plan.recompute_every),
            (plan.sequence_parallel, plan.shard_activations, plan.offload, plan.context_method),
            (plan.microbatch, self.divided.frame.chunks),
            (self.schedule != "1f1b", self.schedule),
            tuple(stage.num_layers for stage in self.divided.frame.stages),
        )


def rounded(value: float) -> float:
    """A value to nine significant digits."""
    return float(f"{value:.9g}")
