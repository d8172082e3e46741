"""Placements that others would choose, in the same simulation.

Source: AlpaServe (2302.11665), section 6: selective replication, Clockwork++ (replication that is
re-placed for each window at no cost), and round robin over pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from triptych.fleet.greedy import fill
from triptych.fleet.judge import Judge, Verdict
from triptych.fleet.models import Fleet, Shape
from triptych.fleet.placement import Group, Placement, empty
from triptych.simulate.trace import Trace

SINGLE = Shape(1)


def replication(fleet: Fleet, traces: Sequence[Trace]) -> Placement:
    """Every device a group of its own, filled greedily."""
    return fill(empty([SINGLE] * fleet.num_devices), Judge(fleet, traces))[0]


def round_robin(fleet: Fleet, shape: Shape) -> Placement:
    """Models dealt out in turn over groups of one shape, round after round.

    A model that does not fit where the turn is is passed over; dealing ends when none fits there.
    """
    groups = [Group(shape) for _ in range(fleet.num_devices // shape.devices)]
    turn = 0
    added = bool(groups)
    while added:
        added = False
        for model in range(len(fleet.models)):
            if groups[turn].takes(model, fleet):
                groups[turn] = groups[turn].with_model(model)
                turn, added = (turn + 1) % len(groups), True
    return Placement(tuple(groups))


def replaced(fleet: Fleet, trace: Trace, window_s: float, *, clairvoyant: bool = False) -> Verdict:
    """Replication planned anew for each window, at no cost.

    Queues do not outlive a window.

    Args:
        fleet: models and devices.
        trace: requests to be served.
        window_s: seconds between two placements.
        clairvoyant: plan each window on its own requests, as published; else on those of the
            window before (the first one on its own).

    """
    parts = list(replans(fleet, trace, window_s, clairvoyant=clairvoyant))
    verdicts = [Judge(fleet, [window]).of(placement) for window, placement in parts]
    return Verdict(
        np.sum([v.asked for v in verdicts], axis=0),
        np.sum([v.served for v in verdicts], axis=0),
        np.sum([v.busy_s for v in verdicts], axis=0),
        float(trace.arrival_s[-1]),
    )


def replans(
    fleet: Fleet, trace: Trace, window_s: float, *, clairvoyant: bool = False
) -> Iterator[tuple[Trace, Placement]]:
    """The windows of a trace, each with its replication; arguments as for `replaced`."""
    windows = list(_windows(trace, window_s))
    plans = windows if clairvoyant else [windows[0], *windows[:-1]]
    for window, plan in zip(windows, plans, strict=True):
        yield window, replication(fleet, [plan])


def _windows(trace: Trace, window_s: float) -> list[Trace]:
    index = (trace.arrival_s // window_s).astype(int)
    return [trace.only(index == i) for i in np.unique(index)]
