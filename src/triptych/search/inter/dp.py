"""Stages by dynamic programming: spans of layers on submeshes, each with one of its options.

Made small is `fill` x sum of the stages' seconds + (micro-batches - 1) x the slowest stage's, which
for `fill` 1 is the time of 1F1B with stages that need not be alike. A stage with n stages behind it
has n + 1 micro-batches in flight.

    F(s, k, d; t) = min over options o, counts c of
                    t_o(k..k+c) + F(s - 1, k + c, d - devices_o; t),  every stage at most t

The slowest stage t is one of the options' seconds: the smallest with an answer is found by
bisection of what capacity allows, larger ones are looked at where (m - 1) t + fill x (the least sum
up to there) could be less than the best. Source: Zheng et al. 2022, "Alpa", sec. 5.2, eqs. 2-5.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FIT = 1 + 1e-9


@dataclass(frozen=True, eq=False, kw_only=True)
class Option:
    """Degrees on a submesh. Arrays are indexed [layers - 1, first layer]; inf: impossible."""

    devices: tuple[int, ...]  # of each group of nodes
    seconds: Array  # of one micro-batch
    state_bytes: Array  # on a device, whatever is in flight
    flight_bytes: Array  # more for each micro-batch in flight
    limit_bytes: float

    def in_flight(self, room: float = 1.0) -> Array:
        """Micro-batches that each span can have in flight in a part of the limit; 0: none fits."""
        left_bytes = FIT * room * self.limit_bytes - self.state_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(left_bytes / self.flight_bytes)
        most[self.flight_bytes == 0] = np.inf
        return np.where((left_bytes >= 0) & np.isfinite(self.seconds), most, 0.0)


class Span(NamedTuple):
    """A stage: layers from `start` to `stop` (excluded) with an option."""

    start: int
    stop: int
    option: int


class Pipeline(NamedTuple):
    """Stages in model order, the sum of their seconds, the slowest one's."""

    stages: tuple[Span, ...]
    sum_s: float
    slowest_s: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Stages:
    """The question: which spans on which options, all layers and all devices used."""

    num_layers: int
    devices: tuple[int, ...]  # of each group of nodes
    num_microbatches: int
    options: Sequence[Option]
    fill: float = 1.0
    room: float = 1.0  # part of each option's memory limit that is used

    def objective_s(self, found: Pipeline) -> float:
        """What is made small."""
        return self._least_s(found.slowest_s, found.sum_s)

    def best(self, below_s: float = float("inf")) -> Pipeline | None:
        """The best stages; None if none take less than `below_s`."""
        limits_s = self._limits_s(below_s)
        if not limits_s or not self._may_hold(limits_s[-1]):
            return None
        first = bisect_left(limits_s, True, key=self._may_hold)
        most_s = (below_s - self._least_s(limits_s[first], 0.0)) / self.fill
        best = self._within(limits_s[-1], most_s)
        if best is None:
            return None
        between = [(first - 1, len(limits_s) - 1, best.sum_s)]
        while between:
            low, high, sum_s = between.pop()
            if high - low < 2:
                continue
            if self._least_s(limits_s[low + 1], sum_s) >= min(below_s, self.objective_s(best)):
                continue
            middle = (low + high) // 2
            found = self._within(limits_s[middle], most_s)
            between.append((middle, high, sum_s))
            if found is not None:
                best = min(best, found, key=self.objective_s)
                between.append((low, middle, found.sum_s))
        return best if self.objective_s(best) < below_s else None

    def _least_s(self, slowest_s: float, sum_s: float) -> float:
        """What stages take at least whose slowest takes and whose sum is at least so much."""
        return self.fill * sum_s + (self.num_microbatches - 1) * slowest_s

    def _may_hold(self, limit_s: float) -> bool:
        return self._may_cover([most.max(1) for most in self._usable(limit_s)])

    def _limits_s(self, below_s: float) -> list[float]:
        """What the slowest stage may take, ascending, if all is to take less than `below_s`."""
        every = [option.seconds[np.isfinite(option.seconds)] for option in self.options]
        limits_s = np.unique(np.concatenate([*every, np.zeros(0)]))
        longest = self.fill * limits_s + (self.num_microbatches - 1) * limits_s
        return [float(limit) for limit in limits_s[longest < below_s]]

    # --- one limit -------------------------------------------------------------------------------

    @cached_property
    def _most(self) -> list[Array]:
        """For each option the micro-batches that its spans can have in flight."""
        return [option.in_flight(self.room) for option in self.options]

    def _usable(self, limit_s: float) -> list[Array]:
        """The same, 0 for spans that take longer than the limit."""
        pairs = zip(self.options, self._most, strict=True)
        return [np.where(option.seconds <= limit_s, most, 0.0) for option, most in pairs]

    def _within(self, limit_s: float, most_s: float) -> Pipeline | None:
        """The stages with the least sum below `most_s`, each of them at most `limit_s`."""
        usable = self._usable(limit_s)
        counts = [most.max(1) for most in usable]
        if not self._may_cover(counts):
            return None
        shape = (self.num_layers + 1, *(count + 1 for count in self.devices))
        done = np.full(shape, np.inf)
        done[(self.num_layers, *([0] * len(self.devices)))] = 0.0
        sums = [done]
        end = (0, *self.devices)
        best = 0
        while np.isfinite(sums[-1]).any() and len(sums) <= self.num_layers:
            more = self._one_more(sums[-1], len(sums) - 1, usable, counts)
            more[more >= most_s] = np.inf
            sums.append(more)
            if sums[-1][end] < sums[best][end]:
                best = len(sums) - 1
        return self._trace(sums[: best + 1], usable) if np.isfinite(sums[best][end]) else None

    def _may_cover(self, counts: Sequence[Array]) -> bool:
        """False if all devices together cannot hold all layers, wherever the layers are.

        `counts` are, for each option and number of layers, the most micro-batches in flight.
        """
        most = np.full(tuple(count + 1 for count in self.devices), -np.inf)
        most[(0,) * len(self.devices)] = 0.0
        submeshes = self._by_submesh(counts)
        for behind in range(self.num_layers):
            more = np.full(most.shape, -np.inf)
            for devices, flights in submeshes.items():
                fitting = np.flatnonzero(flights >= self._in_flight(behind))
                if not len(fitting):
                    continue
                into, rest = _moved(devices)
                np.maximum(more[into], most[rest] + float(fitting[-1] + 1), out=more[into])
            if more[self.devices] >= self.num_layers:
                return True
            if not np.isfinite(more).any():
                return False
            most = more
        return False

    def _by_submesh(self, counts: Sequence[Array]) -> dict[tuple[int, ...], Array]:
        """For each submesh that there is room for, the most of any of its options."""
        found: dict[tuple[int, ...], Array] = {}
        for option, flights in zip(self.options, counts, strict=True):
            if self._has_room(option):
                known = found.get(option.devices)
                found[option.devices] = flights if known is None else np.maximum(known, flights)
        return found

    def _in_flight(self, behind: int) -> int:
        """Micro-batches in flight with so many stages behind."""
        return min(self.num_microbatches, behind + 1)

    def _has_room(self, option: Option) -> bool:
        return all(n <= count for n, count in zip(option.devices, self.devices, strict=True))

    def _one_more(
        self, sums: Array, behind: int, usable: Sequence[Array], counts: Sequence[Array]
    ) -> Array:
        """The least sums with one more stage in front; `sums` are those with `behind` stages."""
        more = np.full(sums.shape, np.inf)
        first = int(np.flatnonzero(np.isfinite(sums).reshape(len(sums), -1).any(1))[0])
        flights, ones = self._in_flight(behind), [1] * len(self.devices)
        for option, most, fitting in zip(self.options, usable, counts, strict=True):
            if not self._has_room(option):
                continue
            into, rest = _moved(option.devices)
            for count in (np.flatnonzero(fitting >= flights) + 1).tolist():
                start = max(0, first - count)
                stop = self.num_layers - count + 1
                at = (count - 1, slice(start, stop))
                own_s = np.where(most[at] >= flights, option.seconds[at], np.inf)
                total = own_s.reshape(-1, *ones) + sums[(slice(start + count, None), *rest)]
                place = more[(slice(start, stop), *into)]
                np.minimum(place, total, out=place)
        return more

    def _trace(self, sums: Sequence[Array], usable: Sequence[Array]) -> Pipeline:
        """The stages behind the last sum."""
        stages: list[Span] = []
        slowest_s, layer, left = 0.0, 0, self.devices
        for behind in reversed(range(len(sums) - 1)):
            span, rest = self._stage(sums, behind, layer, left, usable)
            stages.append(span)
            own_s = self.options[span.option].seconds[span.stop - span.start - 1, span.start]
            slowest_s, layer, left = max(slowest_s, float(own_s)), span.stop, rest
        return Pipeline(tuple(stages), float(sums[-1][(0, *self.devices)]), slowest_s)

    def _stage(
        self,
        sums: Sequence[Array],
        behind: int,
        layer: int,
        left: tuple[int, ...],
        usable: Sequence[Array],
    ) -> tuple[Span, tuple[int, ...]]:
        """A stage that begins at `layer` and makes the sum with `behind` stages after it."""
        wanted, flights = sums[behind + 1][(layer, *left)], self._in_flight(behind)
        for index, (option, most) in enumerate(zip(self.options, usable, strict=True)):
            rest = tuple(a - b for a, b in zip(left, option.devices, strict=True))
            if min(rest) < 0:
                continue
            for count in range(1, self.num_layers - layer + 1):
                at, stop = (count - 1, layer), layer + count
                is_open = most[at] >= flights
                if is_open and option.seconds[at] + sums[behind][(stop, *rest)] == wanted:
                    return Span(layer, stop, index), rest
        raise AssertionError("every sum comes from a stage")


def _moved(devices: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where in an array over devices counts with a submesh are, and where they were without."""
    into = tuple(slice(n, None) for n in devices)
    return into, tuple(slice(None, -n or None) for n in devices)
