"""What spans of layers cost at a place: options of the dynamic programme, from the cost model.

A span's seconds and bytes are sums over its layers, each priced as a stage of its own by the same
frame that prices plans; only what stages share (buffers, the last reduction) is shared out by
parameters. The plans that come of it are priced exactly afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from triptych.cost.frame import Frame
from triptych.cost.memory import room_bytes, state_bytes
from triptych.cost.pricer import Pricer
from triptych.cost.storage import Storage
from triptych.plan.plan import Stage
from triptych.search.inter.dp import Array, Option
from triptych.search.inter.rounds import Place, Round, base_plan, setting
from triptych.search.space import Space


@dataclass(frozen=True, kw_only=True)
class Units:
    """Layers in clusters, and where they are priced."""

    space: Space
    pricer: Pricer
    bounds: tuple[int, ...]  # first layers of the clusters, and the number of layers
    _stages: dict[Place, tuple[Stage, ...]] = field(default_factory=dict, repr=False)
    _frames: dict[tuple[Place, Round], Frame] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Clusters."""
        return len(self.bounds) - 1

    def frame(self, place: Place, shared: Round) -> Frame:
        """Every cluster as a stage at a place, priced."""
        key = (place, shared)
        if key not in self._frames:
            own, stages = self.pricer.on(frozenset({place.group})), self._divided(place)
            chosen = (setting(self.space, place, shared),) * len(stages)
            count = self.space.workload.global_batch // shared.rows
            self._frames[key] = Frame.build(own, stages, chosen, 1, False, count)
        return self._frames[key]

    def _divided(self, place: Place) -> tuple[Stage, ...]:
        """The same object for the same place: pricers know stages again by it."""
        if place not in self._stages:
            self._stages[place] = tuple(place.stage(a, b) for a, b in pairwise(self.bounds))
        return self._stages[place]

    def option(self, place: Place, shared: Round, zero: int) -> Option:
        """What every span of clusters costs at a place."""
        frame = self.frame(place, shared)
        plan = base_plan(self.space, shared, zero).with_(stages=frame.stages[:1])
        storage = Storage.of(plan)
        return Option(
            devices=_devices(self.space, place),
            seconds=_spans(self._seconds(place, frame, storage)),
            state_bytes=self._state(frame, storage) + self._passing(frame, shared),
            flight_bytes=_spans([c.saved_bytes + c.head_gradient_bytes for c in frame.costs]),
            limit_bytes=self._room_bytes(frame),
        )

    def _room_bytes(self, frame: Frame) -> float:
        """Bytes of tensors on a device of a place."""
        limit_bytes = self.space.room_bytes(frame.pricer.memory_limit_bytes)
        return room_bytes(limit_bytes, frame.footprint, frame.is_cpu)

    def _seconds(self, place: Place, frame: Frame, storage: Storage) -> list[float]:
        """Forward and backward of each cluster, and its share of the end of a step."""
        pairs, _ = frame.passes(storage)
        stage = (place.stage(0, self.bounds[-1]),)
        built = (frame.settings[:1], 1, False, frame.num_microbatches)
        tail = Frame.build(frame.pricer, stage, *built).tail(0, storage)
        held = [cost.holdings.total for cost in frame.costs]
        end_s = (tail.early_s + tail.optimizer_s + tail.gather_s) / frame.num_microbatches
        return [
            forward_s + backward_s + end_s * own / sum(held)
            for (forward_s, backward_s), own in zip(pairs, held, strict=True)
        ]

    def _state(self, frame: Frame, storage: Storage) -> Array:
        """Bytes of weights, gradients and optimizer of spans, and of the buffers between them."""
        each = {
            id(c): state_bytes([c], storage, frame.footprint) for c in dict.fromkeys(frame.costs)
        }
        parts = [each[id(cost)] for cost in frame.costs]
        least = min(part[3] for part in parts)
        held = [float(cost.holdings.total) for cost in frame.costs]
        most = state_bytes(frame.costs, storage, frame.footprint)[3]
        buffers = least + (most - least) * np.minimum(1.0, _spans(held) / sum(held))
        largest = max(part[3] for part in parts)
        return _spans([sum(part[:3]) for part in parts]) + np.maximum(buffers, largest)

    def _passing(self, frame: Frame, shared: Round) -> float:
        """Bytes of what is there for a while: one backward's tensors, messages, gathers, logits."""
        working = max(cost.working_bytes for cost in frame.costs)
        logits = max(cost.logits_bytes for cost in frame.costs)
        site = frame.pricer.site(frame.settings[0])
        waiting = 2 * site.message_bytes(frame.settings[0])
        gathered = site.activation_bytes(frame.settings[0]) if shared.sequence_parallel else 0.0
        return working + logits + waiting + gathered


def _devices(space: Space, place: Place) -> tuple[int, ...]:
    groups = range(len(space.cluster.groups))
    return tuple(place.num_devices * (index == place.group) for index in groups)


def _spans(each: Sequence[float]) -> Array:
    """Sums of `count` values from `start`, at [count - 1, start]; inf past the end."""
    number = len(each)
    prefix = np.full(2 * number + 1, np.inf)
    prefix[: number + 1] = [0.0, *accumulate(each)]
    found: Array = prefix[_stops(number)] - prefix[:number]
    return found


@lru_cache(maxsize=8)
def _stops(number: int) -> NDArray[np.intp]:
    """`start + count` at [count - 1, start]."""
    return np.arange(1, number + 1)[:, None] + np.arange(number)


def undominated(options: Sequence[tuple[Place, Option]]) -> list[tuple[Place, Option]]:
    """Without options that another on equally many devices beats in time and in memory."""
    kept: list[tuple[Place, Option]] = []
    for place, option in sorted(options, key=lambda pair: _figures(pair[1])):
        others = (other for _, other in kept if other.devices == option.devices)
        if not any(_no_worse(other, option) for other in others):
            kept.append((place, option))
    return kept


def _figures(option: Option) -> tuple[float, float, float]:
    """Of the whole model."""
    return (
        float(option.seconds[-1, 0]),
        float(option.state_bytes[-1, 0]),
        float(option.flight_bytes[-1, 0]),
    )


def _no_worse(one: Option, other: Option) -> bool:
    return all(a <= b for a, b in zip(_figures(one), _figures(other), strict=True))
