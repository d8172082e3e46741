"""How good a placement is: requests simulated through it, and what became of each model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.fleet.models import Fleet
from triptych.fleet.placement import Placement
from triptych.simulate import single_shot
from triptych.simulate.trace import Trace

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Requests by model and by group."""

    asked: Counts  # of each model
    served: Counts  # of each model, all within their objectives
    busy_s: Floats  # of the slowest stage of each group
    duration_s: float

    @property
    def attainment(self) -> float:
        """Share of all requests that were served in time; 1 if there was none."""
        asked = int(self.asked.sum())
        return int(self.served.sum()) / asked if asked else 1.0

    @property
    def missed(self) -> Counts:
        """Requests of each model that were refused."""
        return self.asked - self.served

    @property
    def utilisation(self) -> Floats:
        """Busy share of the slowest stage of each group."""
        return self.busy_s / self.duration_s if self.duration_s else self.busy_s


class Judge:
    """Simulates placements on one or several traces, together as one.

    `num_requests` counts what has been simulated.
    """

    def __init__(self, fleet: Fleet, traces: Sequence[Trace]) -> None:
        self.fleet = fleet
        self.traces = traces
        self.num_requests = 0

    def of(self, placement: Placement) -> Verdict:
        """What becomes of all requests."""
        lines = placement.lines(self.fleet)
        asked, served = np.zeros((2, len(self.fleet.models)), np.int64)
        busy_s, duration_s = np.zeros(len(lines)), 0.0
        for trace in self.traces:
            outcome = single_shot.simulate(
                trace.arrival_s, trace.model, lines, trace.slo_s, self.fleet.overhead_s
            )
            done = outcome.group >= 0
            asked += np.bincount(trace.model, minlength=len(asked))
            served += np.bincount(trace.model[done], minlength=len(asked))
            busy_s += _busy_s(lines, outcome.group, trace.model)
            duration_s += float(trace.arrival_s[-1]) if len(trace) else 0.0
            self.num_requests += len(trace)
        return Verdict(asked, served, busy_s, duration_s)

    def narrowed(self, models: Iterable[int]) -> Judge:
        """The same for the requests of some models only."""
        kept = sorted(models)
        return Judge(self.fleet, [t.only(np.isin(t.model, kept)) for t in self.traces])


def _busy_s(lines: Sequence[single_shot.Group], group: Counts, model: Counts) -> Floats:
    found = np.zeros(len(lines))
    for index, line in enumerate(lines):
        held = list(line.stage_s)
        counts = np.bincount(model[group == index], minlength=max(held, default=0) + 1)
        slowest = np.array([max(line.stage_s[m]) for m in held])
        found[index] = counts[held] @ slowest if held else 0.0
    return found


def busy_shares(
    fleet: Fleet, placement: Placement, trace: Trace, num_bins: int
) -> tuple[Floats, Floats]:
    """Equal stretches of time and how busy the last stage of each group is in each.

    Returns:
        The edges of the stretches in seconds, from 0 to the end of the last request that is served;
        busy shares, a row for each group.

    """
    lines = placement.lines(fleet)
    outcome = single_shot.simulate(
        trace.arrival_s, trace.model, lines, trace.slo_s, fleet.overhead_s
    )
    left_s = outcome.finish_s - fleet.overhead_s
    edges_s = np.linspace(0.0, max(float(np.nanmax(left_s, initial=0.0)), 1e-9), num_bins + 1)
    found = np.zeros((len(lines), num_bins))
    for index, line in enumerate(lines):
        (mine,) = np.nonzero(outcome.group == index)
        if not len(mine):
            continue
        lasts_s = np.array([line.stage_s[m][-1] for m in trace.model[mine].tolist()])
        # Stretches of one stage follow each other: busy time grows along them only.
        turns_s = np.stack([left_s[mine] - lasts_s, left_s[mine]], axis=1).ravel()
        busy_s = np.repeat(np.concatenate([[0.0], np.cumsum(lasts_s)]), 2)[1:-1]
        found[index] = np.diff(np.interp(edges_s, turns_s, busy_s)) / np.diff(edges_s)
    return edges_s, found
