"""How attainment changes with the load: rate, burstiness, objectives, number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from triptych.errors import InputError
from triptych.fleet.baselines import replication
from triptych.fleet.file import FleetFile
from triptych.fleet.find import Effort, find
from triptych.fleet.judge import Judge
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Placement
from triptych.simulate.arrivals import scaled
from triptych.simulate.trace import Trace

Points = list[tuple[float, float]]  # (what is changed, attainment)
Curves = dict[str, Points]  # by placement

RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
CVS = (0.25, 0.5, 1.0, 1.5, 2.0)
OBJECTIVES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
DEVICES = (0.5, 0.75, 1.0, 1.25, 1.5)
QUICK = Effort(trials=0, finalists=1)


def over_load(
    given: FleetFile, judged: Trace, placements: Mapping[str, Placement]
) -> dict[str, Curves]:
    """Attainment of placements as they are under other loads; no CV where requests are recorded."""
    found = {
        "requests a second": {
            factor * judged.rate_per_s: _at_rate(given, judged, factor) for factor in RATES
        },
        "objectives, in those of the file": {
            factor: replace(judged, slo_s=judged.slo_s * factor) for factor in OBJECTIVES
        },
    }
    if given.requests.trace is None:
        found["CV of arrivals"] = {
            factor * given.requests.windows[0].cv: _redrawn(given, cv=factor) for factor in CVS
        }
    return {
        across: {
            name: [(x, Judge(given.fleet, [t]).of(p).attainment) for x, t in traces.items()]
            for name, p in placements.items()
        }
        for across, traces in found.items()
    }


def over_devices(fleet: Fleet, planned_on: Sequence[Trace], judged: Trace) -> Curves:
    """Attainment when other numbers of devices are placed anew, beside replication."""
    ours: Points = []
    replicated: Points = []
    for count in sorted({max(1, round(fleet.num_devices * factor)) for factor in DEVICES}):
        other = replace(fleet, num_devices=count)
        judge = Judge(other, [judged])
        try:
            placement = find(other, planned_on, QUICK).placement
        except InputError:  # a model fits no group of so few
            continue
        ours.append((count, judge.of(placement).attainment))
        replicated.append((count, judge.of(replication(other, planned_on)).attainment))
    return {"placed anew": ours, "replication": replicated}


def _at_rate(given: FleetFile, judged: Trace, factor: float) -> Trace:
    if given.requests.trace is not None:
        return judged.at_rate(judged.rate_per_s * factor)
    return _redrawn(given, rate=factor)


def _redrawn(given: FleetFile, rate: float = 1.0, cv: float = 1.0) -> Trace:
    windows = tuple(scaled(given.requests.windows, rate=rate, cv=cv))
    return given.draw(replace(given.requests, windows=windows))
