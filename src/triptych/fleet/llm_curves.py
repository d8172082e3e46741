"""LLMs on their groups over time, and how attainment changes with the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from triptych.cluster.cluster import Cluster
from triptych.fleet.curves import CVS, DEVICES, OBJECTIVES, RATES, Curves, Points
from triptych.fleet.llm import LlmFleet, LlmGroup
from triptych.fleet.llm_file import LlmFile
from triptych.fleet.models import Shape
from triptych.fleet.place_llm import planned
from triptych.fleet.shared import SharedFleet
from triptych.simulate.arrivals import scaled
from triptych.simulate.trace import Trace

Placements = Mapping[str, Sequence[LlmGroup]]


def over_load(
    file: LlmFile, fleet: LlmFleet, judged: Trace, placements: Placements
) -> dict[str, Curves]:
    """Attainment of placements as they are under other loads; no CV where requests are recorded."""
    rates = {f * judged.rate_per_s: (fleet, _at_rate(file, judged, f)) for f in RATES}
    objectives = {factor: (fleet.with_objectives(factor), judged) for factor in OBJECTIVES}
    found = {
        "requests a second": rates,
        "objectives, in those of the file": objectives,
    }
    source = file.requests
    if source is not None and source.trace is None:
        cvs = {f * source.windows[0].cv: (fleet, _redrawn(file, cv=f)) for f in CVS}
        found["CV of arrivals"] = cvs
    return {
        across: {
            name: [(x, float(each.served(groups, t).mean())) for x, (each, t) in points.items()]
            for name, groups in placements.items()
        }
        for across, points in found.items()
    }


def over_devices(fleet: LlmFleet, planned_on: Trace, judged: Trace) -> Curves:
    """Attainment when clusters of other sizes are placed anew, beside one device a group."""
    ours: Points = []
    replicated: Points = []
    for cluster in _resized(fleet.cluster):
        other = fleet.on(cluster)
        kinds = planned(other, planned_on)
        if not kinds:
            continue  # no shape of groups on so few holds all models
        best = max(kinds, key=lambda shape: kinds[shape][1])
        count = cluster.num_devices
        ours.append((count, float(other.served(kinds[best][0], judged).mean())))
        if Shape(1) in kinds:
            replicated.append((count, float(other.served(kinds[Shape(1)][0], judged).mean())))
    curves = {"placed anew": ours, "groups of 1x1": replicated}
    return {name: points for name, points in curves.items() if points}


def busy_shares(simulated: SharedFleet, num_groups: int, duration_s: float, bins: int
                ) -> list[list[float]]:  # fmt: skip
    """Of equal stretches of time, the part in which a step was under way on each group."""
    edges_s = np.linspace(0.0, duration_s, bins + 1)
    found = []
    for group in range(num_groups):
        spans = np.array([(b, e) for g, b, e in simulated.steps if g == group]).reshape(-1, 2)
        begun, lasting = spans[:, 0], spans[:, 1] - spans[:, 0]
        until = np.array([np.clip(edge - begun, 0.0, lasting).sum() for edge in edges_s])
        found.append(np.minimum(1.0, np.diff(until) / (duration_s / bins)).round(4).tolist())
    return found


def _resized(cluster: Cluster) -> list[Cluster]:
    """The cluster with fewer and more nodes, or devices where it is one node; itself among them."""
    if len(cluster.groups) > 1:
        return [cluster]
    (group,) = cluster.groups
    is_node = group.nodes == 1
    size = group.devices_per_node if is_node else group.nodes
    counts = sorted({max(1, round(size * factor)) for factor in DEVICES})
    groups = [
        replace(group, devices_per_node=count) if is_node else replace(group, nodes=count)
        for count in counts
    ]
    return [replace(cluster, groups=(each,)) for each in groups]


def _at_rate(file: LlmFile, judged: Trace, factor: float) -> Trace:
    if file.requests is None or file.requests.trace is not None:
        return judged.at_rate(judged.rate_per_s * factor)
    return _redrawn(file, rate=factor)


def _redrawn(file: LlmFile, rate: float = 1.0, cv: float = 1.0) -> Trace:
    assert file.requests is not None
    windows = tuple(scaled(file.requests.windows, rate=rate, cv=cv))
    return replace(file, requests=replace(file.requests, windows=windows)).draw()
