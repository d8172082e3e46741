"""Single-shot models on groups of devices: stages of fixed latency, first come first served.

A request runs once through the stages of one group. Rules, in the order of the requests given
(by arrival; equal times keep their order):

1. It goes to the group that holds its model and whose first stage is free earliest (that time may
   be past); of several, the first.
2. On each stage it starts when it has left the stage before and the stage is free.
3. If its finish plus a fixed overhead misses its objective, it is refused on arrival and occupies
   nothing.

Source: AlpaServe (2302.11665), sections 3 and 4.3; how its fast simulator counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that form one pipeline: seconds of each stage, for each model that it holds.

    All models have as many stages.
    """

    stage_s: Mapping[int, tuple[float, ...]]

    @property
    def depth(self) -> int:
        """Stages; 0 if it holds nothing."""
        (depth,) = {len(stages) for stages in self.stage_s.values()} or {0}
        return depth

    @property
    def common(self) -> tuple[float, ...] | None:
        """The stages that all its models share, if they do."""
        kinds = set(self.stage_s.values())
        return next(iter(kinds)) if len(kinds) == 1 else None


class Outcome(NamedTuple):
    """What became of each request."""

    finish_s: Floats  # not a number if refused
    group: Counts  # -1 if refused

    @property
    def attainment(self) -> float:
        """Share of all requests that were served, all within their objectives."""
        return float(np.mean(self.group >= 0))


def simulate(
    arrival_s: Floats,
    model: Counts,
    groups: Sequence[Group],
    slo_s: Floats | None = None,
    overhead_s: float = 0.0,
) -> Outcome:
    """Runs all requests; without objectives nothing is refused but what no group holds."""
    holders = [
        [index for index, group in enumerate(groups) if number in group.stage_s]
        for number in range(int(model.max(initial=-1)) + 1)
    ]
    if slo_s is None and all(len(h) == 1 for h in holders) and all(g.common for g in groups):
        return _by_recursion(arrival_s, model, groups, holders, overhead_s)
    limits = [math.inf] * len(arrival_s) if slo_s is None else (slo_s - overhead_s).tolist()
    requests = (arrival_s.tolist(), model.tolist(), limits)
    if all(group.common or not group.stage_s for group in groups):
        ends, chosen = _uniform(*requests, groups, holders)
    else:
        ends, chosen = _general(*requests, groups, holders)
    return Outcome(np.array(ends) + overhead_s, np.array(chosen, dtype=np.int64))


def _by_recursion(
    arrival_s: Floats,
    model: Counts,
    groups: Sequence[Group],
    holders: list[list[int]],
    overhead_s: float,
) -> Outcome:
    """No choice, no refusal: end_i = max(arrival_i + total, end_{i-1} + longest), at array speed.

    A line of stages with fixed times lets requests out as its slowest stage alone would
    (Friedman 1965); with x_i = end_i - i x longest the recursion is a running maximum.
    """
    chosen = np.array([only for (only,) in holders], dtype=np.int64)[model]
    finish_s = np.empty(len(arrival_s))
    for index, group in enumerate(groups):
        (mine,) = np.nonzero(chosen == index)
        if group.common and len(mine):
            longest = max(group.common) * np.arange(len(mine))
            own = arrival_s[mine] + sum(group.common) - longest
            finish_s[mine] = np.maximum.accumulate(own) + longest
    return Outcome(finish_s + overhead_s, chosen)


def _uniform(
    arrival_s: list[float],
    model: list[int],
    limit_s: list[float],
    groups: Sequence[Group],
    holders: list[list[int]],
) -> tuple[list[float], list[int]]:
    """All models of a group alike: two numbers a group, whatever its depth (see above)."""
    common = [group.common or (0.0,) for group in groups]
    first = [stages[0] for stages in common]
    total = [sum(stages) for stages in common]
    longest = [max(stages) for stages in common]
    free = [0.0] * len(groups)  # when the first stage is
    last = [-math.inf] * len(groups)  # when the last request leaves
    ends, chosen = [math.nan] * len(arrival_s), [-1] * len(arrival_s)
    for i, (now, number, limit) in enumerate(zip(arrival_s, model, limit_s, strict=True)):
        held = holders[number]
        if not held:
            continue
        g = held[0]
        if len(held) > 1:
            earliest = free[g]
            for other in held:
                if free[other] < earliest:
                    g, earliest = other, free[other]
        end, behind = now + total[g], last[g] + longest[g]
        if behind > end:
            end = behind
        if end - now <= limit:
            start = free[g]
            free[g] = (start if start > now else now) + first[g]
            ends[i] = last[g] = end
            chosen[i] = g
    return ends, chosen


def _general(
    arrival_s: list[float],
    model: list[int],
    limit_s: list[float],
    groups: Sequence[Group],
    holders: list[list[int]],
) -> tuple[list[float], list[int]]:
    """Stage by stage: models of one group may differ."""
    free = [(0.0,) * (group.depth or 1) for group in groups]
    first = [0.0] * len(groups)  # of `free`, which is compared most
    lines = [dict(group.stage_s) for group in groups]
    through = [_WRITTEN_OUT.get(group.depth, _any) for group in groups]
    ends, chosen = [math.nan] * len(arrival_s), [-1] * len(arrival_s)
    for i, (now, number, limit) in enumerate(zip(arrival_s, model, limit_s, strict=True)):
        held = holders[number]
        if not held:
            continue
        g = held[0]
        if len(held) > 1:
            earliest = first[g]
            for other in held:
                if first[other] < earliest:
                    g, earliest = other, first[other]
        left = through[g](now, lines[g][number], free[g])
        end = left[-1]
        if end - now <= limit:
            free[g] = left
            first[g] = left[0]
            ends[i] = end
            chosen[i] = g
    return ends, chosen


# When a request leaves each stage, from the time it comes, its stages and when they are free.
Line = tuple[float, ...]


def _any(now: float, stage_s: Line, free: Line) -> Line:
    left = []
    for seconds, busy in zip(stage_s, free, strict=True):
        now = (busy if busy > now else now) + seconds
        left.append(now)
    return tuple(left)


def _one(now: float, stage_s: Line, free: Line) -> Line:
    return ((free[0] if free[0] > now else now) + stage_s[0],)


def _two(now: float, stage_s: Line, free: Line) -> Line:
    (a_s, b_s), (a, b) = stage_s, free
    at_a = (a if a > now else now) + a_s
    return at_a, (b if b > at_a else at_a) + b_s


def _four(now: float, stage_s: Line, free: Line) -> Line:
    (a_s, b_s, c_s, d_s), (a, b, c, d) = stage_s, free
    at_a = (a if a > now else now) + a_s
    at_b = (b if b > at_a else at_a) + b_s
    at_c = (c if c > at_b else at_b) + c_s
    return at_a, at_b, at_c, (d if d > at_c else at_c) + d_s


def _eight(now: float, stage_s: Line, free: Line) -> Line:
    half = _four(now, stage_s[:4], free[:4])
    return half + _four(half[3], stage_s[4:], free[4:])


_WRITTEN_OUT = {
    1: _one,
    2: _two,
    4: _four,
    8: _eight,
}  # the loop over requests spends its time in them
