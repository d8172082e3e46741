"""Every plan of a space priced: those that fit in memory, and how near the others come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.step import Priced, step_bound_s, step_seconds
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan, Stage
from triptych.schedule.traits import TRAITS
from triptych.search.space import Degrees, Space
from triptych.search.splits import layer_splits

FIT = 1 + 1e-9
"""A peak equal to the limit fits, whatever the order in which its terms were added."""


class Option(NamedTuple):
    """One plan of the space, priced far enough to be ranked."""

    degrees: Degrees
    frame: Frame
    priced: Priced
    storage: Storage
    schedule: str
    peak_bytes: float
    bound_s: float  # the step takes at least this long

    def step_s(self) -> float:
        """The step time, by simulation."""
        return step_seconds(self.frame, self.priced, self.schedule)

    def plan(self, base: Plan) -> Plan:
        """The plan itself."""
        return _plan(base, self.frame, self.storage.zero, self.schedule)


class Nearest(NamedTuple):
    """The plan that needs least memory."""

    peak_bytes: float
    frame: Frame
    zero: int
    schedule: str

    def plan(self, base: Plan) -> Plan:
        """The plan itself."""
        return _plan(base, self.frame, self.zero, self.schedule)


@dataclass(slots=True)
class Found:
    """What a walk over a space has found."""

    options: list[Option] = field(default_factory=list)
    too_large: int = 0
    nearest: Nearest | None = None


def walk(space: Space, pricer: Pricer) -> Found:
    """Prices every legal plan of a space."""
    found = Found()
    for degrees in space.degrees():
        for stages in _stage_splits(space, pricer, degrees):
            for settings in _settings(space, degrees):
                _price(space, pricer, degrees, stages, settings, found)
    return found


def _stage_splits(space: Space, pricer: Pricer, degrees: Degrees) -> Iterator[tuple[Stage, ...]]:
    parts = degrees.pp * space.base.chunks
    microbatches = space.microbatches(degrees.dp)
    if space.pins.layers:
        splits: tuple[tuple[int, ...], ...] = (space.pins.layers,)
    else:
        setting = _setting(space, degrees, microbatches[0])
        count = space.workload.global_batch // (degrees.dp * microbatches[0])
        splits = layer_splits(pricer, setting, parts, count)
    for counts in splits:
        yield Plan.uniform(
            space.model.num_layers,
            pp=degrees.pp,
            dp=degrees.dp,
            tp=degrees.tp,
            cp=degrees.cp,
            ep=degrees.ep,
            chunks=space.base.chunks,
            layers=counts,
        ).stages


def _settings(space: Space, degrees: Degrees) -> Iterator[list[Setting]]:
    """Settings that differ in the micro-batch only, ascending."""
    microbatches = space.microbatches(degrees.dp)
    for sequence_parallel in space.sequence_parallel(degrees):
        for recompute in space.recomputes():
            for method in space.context_methods(degrees):
                yield [
                    _setting(space, degrees, m, sequence_parallel, recompute, method)
                    for m in microbatches
                ]


def _setting(
    space: Space,
    degrees: Degrees,
    microbatch: int,
    sequence_parallel: bool = False,
    recompute: str = "none",
    context_method: str = "ring",
) -> Setting:
    return Setting(
        tensor=degrees.tp,
        context=degrees.cp,
        expert=degrees.ep,
        sequence_parallel=sequence_parallel,
        microbatch=microbatch,
        recompute=recompute,
        attention=space.base.attention,
        compile=space.base.compile,
        dtype=space.base.precision.parameter,
        context_method=context_method,
        recompute_every=space.base.recompute_every if recompute != "none" else 1,
        shard_activations=space.base.shard_activations
        and (recompute == "full" and degrees.tp > 1 and not sequence_parallel),
        offloads_activations=space.base.offload == "activations",
    )


def _price(
    space: Space,
    pricer: Pricer,
    degrees: Degrees,
    stages: tuple[Stage, ...],
    settings: list[Setting],
    found: Found,
) -> None:
    """Prices micro-batches, ZeRO stages and schedules of a split.

    All but the head's gradients grows with the micro-batch, so a (ZeRO, schedule) pair that does
    not fit without them is out.
    """
    storages, limit_bytes = _storages(space, degrees), pricer.memory_limit_bytes * FIT
    out: set[tuple[int, str]] = set()
    for setting in settings:
        names = space.schedules(degrees, setting.microbatch)
        pairs = [(storage, name) for storage in storages for name in names]
        alive = [pair for pair in pairs if (pair[0].zero, pair[1]) not in out]
        found.too_large += len(pairs)
        for frame, some in _frames(space, pricer, degrees, stages, setting, alive):
            peaks = _peaks(frame, some, found)
            fitting = [priced for priced in peaks if priced[2] <= limit_bytes]
            found.too_large -= len(fitting)
            out |= {
                (storage.zero, schedule)
                for storage, schedule, peak in peaks
                if peak - frame.shrinking_bytes(schedule) > limit_bytes
            }
            found.options += _options(degrees, frame, fitting)


def _frames(
    space: Space,
    pricer: Pricer,
    degrees: Degrees,
    stages: tuple[Stage, ...],
    setting: Setting,
    pairs: list[tuple[Storage, str]],
) -> Iterator[tuple[Frame, list[tuple[Storage, str]]]]:
    """The frames of a setting, a loop and a V of stages, each with its (ZeRO, schedule) pairs."""
    count = space.workload.global_batch // (degrees.dp * setting.microbatch)
    for is_v_shaped in (False, True):
        some = [pair for pair in pairs if TRAITS[pair[1]].is_v_shaped == is_v_shaped]
        if some:
            shape = (space.base.chunks, is_v_shaped)
            yield Frame.build(pricer, stages, (setting,) * len(stages), *shape, count), some


def _storages(space: Space, degrees: Degrees) -> list[Storage]:
    base = Storage.of(space.base)
    shards = space.base.hybrid_shard or degrees.dp * degrees.cp
    expert_shards = max(1, shards // degrees.ep)
    return [
        base._replace(zero=zero, shards=shards, expert_shards=expert_shards)
        for zero in space.zeros(degrees)
    ]


Peaks = list[tuple[Storage, str, float]]


def _peaks(frame: Frame, pairs: list[tuple[Storage, str]], found: Found) -> Peaks:
    """The pairs with their peaks in bytes; notes the smallest of all."""
    states = {storage.zero: frame.state(storage) for storage, _ in pairs}
    works = {schedule: frame.work(schedule) for _, schedule in pairs}
    peaks: Peaks = []
    for storage, schedule in pairs:
        peak = frame.peak_bytes(states[storage.zero], works[schedule])
        if found.nearest is None or peak < found.nearest.peak_bytes:
            found.nearest = Nearest(peak, frame, storage.zero, schedule)
        peaks.append((storage, schedule, peak))
    return peaks


def _options(degrees: Degrees, frame: Frame, fitting: Peaks) -> Iterator[Option]:
    priced: dict[int, Priced] = {}
    for storage, schedule, peak in fitting:
        if storage.zero not in priced:
            priced[storage.zero] = Priced.of(frame, storage)
        this = priced[storage.zero]
        bound_s = step_bound_s(frame, this, schedule)
        yield Option(degrees, frame, this, storage, schedule, peak, bound_s)


def _plan(base: Plan, frame: Frame, zero: int, schedule: str) -> Plan:
    setting = frame.settings[0]
    return base.with_(
        stages=frame.stages,
        zero=zero,
        schedule=schedule,
        microbatch=setting.microbatch,
        recompute=setting.recompute,
        sequence_parallel=setting.sequence_parallel,
        context_method=setting.context_method,
        recompute_every=setting.recompute_every,
        shard_activations=setting.shard_activations,
    )
