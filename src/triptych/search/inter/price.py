"""What spans of layers cost at a place: options of the dynamic programme, from the cost model.

A span's seconds and bytes are sums over its layers, each priced as a stage of its own by the same
frame that prices plans; only what stages share (buffers, the last reduction) is shared out by
parameters. The plans that come of it are priced exactly afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.cost.frame import Frame
from triptych.cost.memory import room_bytes, state_bytes
from triptych.cost.pricer import Pricer, StageCost
from triptych.cost.storage import Storage
from triptych.plan.plan import Stage
from triptych.search.inter.dp import FIT, Array, Option
from triptych.search.inter.rounds import Place, Round, base_plan, setting
from triptych.search.space import Space

Figures = tuple[float, float, float]


class Sited(NamedTuple):
    """Every cluster as a stage at a place, the whole model as one, and which clusters are alike."""

    frame: Frame
    whole: Frame
    first: tuple[int, ...]  # the first cluster of each kind
    kinds: NDArray[np.intp]  # of each cluster

    def each(self, of_kinds: Sequence[float]) -> Array:
        """A value for each cluster, from one for each kind."""
        return np.array(of_kinds, dtype=float)[self.kinds]

    @property
    def costs(self) -> list[StageCost]:
        """Of each kind."""
        return [self.frame.costs[index] for index in self.first]

    @property
    def passes_s(self) -> float:
        """Forward and backward of all clusters, one after the other."""
        return _total(self.each([cost.forward_s + cost.backward_s for cost in self.costs]))


class Clusters(NamedTuple):
    """What each cluster costs at a place: spans of clusters cost the sums."""

    devices: tuple[int, ...]  # of each group of nodes
    seconds: Array
    state_bytes: Array  # of weights, gradients and optimizer
    held: Array  # parameters
    buffer_bytes: tuple[float, float, float]  # least of a cluster, largest, of all clusters
    passing_bytes: float
    flight_bytes: Array
    limit_bytes: float

    def figures(self) -> Figures:
        """Seconds, resident bytes and bytes in flight of the whole model."""
        _, largest, most = self.buffer_bytes
        state = _total(self.state_bytes) + max(most, largest) + self.passing_bytes
        return _total(self.seconds), state, _total(self.flight_bytes)

    def option(self) -> Option:
        """What every span of clusters costs."""
        least, largest, most = self.buffer_bytes
        shares = np.minimum(1.0, _spans(self.held) / _total(self.held))
        buffers = np.maximum(least + (most - least) * shares, largest)
        return Option(
            devices=self.devices,
            seconds=_spans(self.seconds),
            state_bytes=_spans(self.state_bytes) + buffers + self.passing_bytes,
            flight_bytes=_spans(self.flight_bytes),
            limit_bytes=self.limit_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Units:
    """Layers in clusters, and where they are priced."""

    space: Space
    pricer: Pricer
    bounds: tuple[int, ...]  # first layers of the clusters, and the number of layers
    _stages: dict[Place, tuple[Stage, ...]] = field(default_factory=dict, repr=False)
    _sites: dict[tuple[Place, Round], Sited] = field(default_factory=dict, repr=False)
    _storages: dict[tuple[Place, int], Storage] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """Clusters."""
        return len(self.bounds) - 1

    def at(self, place: Place, shared: Round) -> Sited:
        """The clusters at a place, priced."""
        key = (place, shared)
        if key not in self._sites:
            self._sites[key] = self._sited(place, shared)
        return self._sites[key]

    def _sited(self, place: Place, shared: Round) -> Sited:
        own, stages = self.pricer.on(frozenset({place.group})), self._divided(place)
        chosen = setting(self.space, place, shared)
        count = self.space.workload.global_batch // shared.rows
        frame = Frame.build(own, stages, (chosen,) * len(stages), 1, False, count)
        stage = (place.stage(0, self.bounds[-1]),)
        kinds: dict[int, int] = {}
        places = [kinds.setdefault(id(cost), len(kinds)) for cost in frame.costs]
        return Sited(
            frame=frame,
            whole=Frame.build(own, stage, (chosen,), 1, False, count),
            first=tuple(places.index(kind) for kind in range(len(kinds))),
            kinds=np.array(places),
        )

    def _divided(self, place: Place) -> tuple[Stage, ...]:
        """The same object for the same place: pricers know stages again by it."""
        if place not in self._stages:
            self._stages[place] = tuple(place.stage(a, b) for a, b in pairwise(self.bounds))
        return self._stages[place]

    def clusters(self, place: Place, shared: Round, zero: int) -> Clusters | None:
        """What clusters cost at a place; None if not one of them fits there."""
        sited, storage = self.at(place, shared), self._storage(place, shared, zero)
        frame, costs = sited.frame, sited.costs
        states = [state_bytes([cost], storage, frame.footprint) for cost in costs]
        kept = [sum(state[:3]) for state in states]
        buffers = [state[3] for state in states]
        flights = [cost.saved_bytes + cost.head_gradient_bytes for cost in costs]
        passing, limit_bytes = self._passing(frame, costs, shared), self._room_bytes(frame)
        alone = min(a + b for a, b in zip(kept, flights, strict=True))
        if alone + max(buffers) + passing > FIT * limit_bytes:
            return None
        most = state_bytes(frame.costs, storage, frame.footprint)[3]
        return Clusters(
            devices=_devices(self.space, place),
            seconds=self._seconds(sited, storage),
            state_bytes=sited.each(kept),
            held=sited.each([cost.holdings.total for cost in costs]),
            buffer_bytes=(min(buffers), max(buffers), most),
            passing_bytes=passing,
            flight_bytes=sited.each(flights),
            limit_bytes=limit_bytes,
        )

    def _storage(self, place: Place, shared: Round, zero: int) -> Storage:
        """Of what is shared only ZeRO's stage says how a place stores the state."""
        key = (place, zero)
        if key not in self._storages:
            plan = base_plan(self.space, shared, zero)
            self._storages[key] = Storage.of(plan.with_(stages=self._divided(place)[:1]))
        return self._storages[key]

    def _room_bytes(self, frame: Frame) -> float:
        """Bytes of tensors on a device of a place."""
        limit_bytes = self.space.room_bytes(frame.pricer.memory_limit_bytes)
        return room_bytes(limit_bytes, frame.footprint, frame.is_cpu)

    def _seconds(self, sited: Sited, storage: Storage) -> Array:
        """Forward and backward of each cluster, and its share of the end of a step."""
        frame, tail = sited.frame, sited.whole.tail(0, storage)
        held = sited.each([cost.holdings.total for cost in sited.costs])
        end_s = (tail.early_s + tail.optimizer_s + tail.gather_s) / frame.num_microbatches
        passes_s = []
        for index, cost in zip(sited.first, sited.costs, strict=True):
            forward_s, backward_s = frame.sharded(storage, index)
            passes_s.append((cost.forward_s + forward_s) + (cost.backward_s + backward_s))
        return sited.each(passes_s) + end_s * held / _total(held)

    def _passing(self, frame: Frame, costs: Sequence[StageCost], shared: Round) -> float:
        """Bytes of what is there for a while: one backward's tensors, messages, gathers, logits."""
        working = max(cost.working_bytes for cost in costs)
        logits = max(cost.logits_bytes for cost in costs)
        site = frame.pricer.site(frame.settings[0])
        waiting = 2 * site.message_bytes(frame.settings[0])
        gathered = site.activation_bytes(frame.settings[0]) if shared.sequence_parallel else 0.0
        return working + logits + waiting + gathered


def _devices(space: Space, place: Place) -> tuple[int, ...]:
    groups = range(len(space.cluster.groups))
    return tuple(place.num_devices * (index == place.group) for index in groups)


def _total(each: Array) -> float:
    """The sum, added up as `_spans` does."""
    return float(np.cumsum(each)[-1])


def _spans(each: Array) -> Array:
    """Sums of `count` values from `start`, at [count - 1, start]; inf past the end."""
    number = len(each)
    prefix = np.full(2 * number + 1, np.inf)
    prefix[0] = 0.0
    np.cumsum(each, out=prefix[1 : number + 1])
    found: Array = prefix[_stops(number)] - prefix[:number]
    return found


@lru_cache(maxsize=8)
def _stops(number: int) -> NDArray[np.intp]:
    """`start + count` at [count - 1, start]."""
    return np.arange(1, number + 1)[:, None] + np.arange(number)


def undominated(priced: Sequence[tuple[Place, Clusters]]) -> list[tuple[Place, Option]]:
    """Options, without those that another on equally many devices beats in time and in memory."""
    kept: list[tuple[Place, Clusters, Figures]] = []
    figured = [(place, clusters, clusters.figures()) for place, clusters in priced]
    for place, clusters, own in sorted(figured, key=lambda each: each[2]):
        others = (known for _, other, known in kept if other.devices == clusters.devices)
        if not any(_no_worse(known, own) for known in others):
            kept.append((place, clusters, own))
    return [(place, clusters.option()) for place, clusters, _ in kept]


def _no_worse(one: Figures, other: Figures) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
