"""When nothing fits: the plan that needs least memory, and the changes that would make one fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict_with
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.plan.plan import Plan
from triptych.search.options import FIT, Found, Nearest, walk
from triptych.search.space import Space
from triptych.units import format_bytes

GROWTH = (2, 4, 8, 16)
"""Times as many devices that are tried."""

_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The least-bad plan: what it needs, what is missing, what would fit."""

    plan: Plan
    prediction: Prediction
    needed_bytes: int  # on the largest rank
    over_bytes: int  # beyond a device's memory
    changes: tuple[str, ...]  # each would make a plan fit

    def to_json(self) -> dict[str, Any]:
        """The prediction with what is missing."""
        return self.prediction.to_json() | {
            "needed_bytes": self.needed_bytes,
            "over_bytes": self.over_bytes,
            "changes": list(self.changes),
        }


def closest(space: Space, pricer: Pricer, nearest: Nearest) -> Closest:
    """The least-bad plan of a space in which nothing fits."""
    plan = nearest.plan(space.base)
    needed = -int(-nearest.peak_bytes // _KIB) * _KIB  # rounded up, so that this much does fit
    return Closest(
        plan=plan,
        prediction=predict_with(pricer, plan),
        needed_bytes=needed,
        over_bytes=needed - int(pricer.memory_limit_bytes),
        changes=tuple(_changes(space, pricer, needed)),
    )


def _changes(space: Space, pricer: Pricer, needed: int) -> Iterator[str]:
    """Changes that make a plan fit, each with that plan's need."""
    yield from _unpinned(space, pricer)
    if space.runnable_only:
        wider = replace(space, runnable_only=False)
        plan = _fitting(wider, pricer)
        if plan:
            yield f"priced, not runnable here: {plan}"
    more = _more_devices(space)
    if more:
        yield more
    yield f"devices with at least {format_bytes(needed)} each ({needed} bytes)"


def _unpinned(space: Space, pricer: Pricer) -> Iterator[str]:
    """Pins that stand in the way on their own."""
    for name, value in space.pins.values.items():
        pins = space.pins.without(name)
        freed = replace(
            space,
            pins=pins,
            base=pins.base_plan(space.model, space.cluster),
        )
        plan = _fitting(freed, pricer)
        if plan:
            yield f"without {name}={value}: {plan}"


def _more_devices(space: Space) -> str:
    """The smallest larger cluster of the same nodes on which a plan fits."""
    for times in GROWTH:
        grown = _grown(space.cluster, times)
        if space.workload.global_batch < grown.num_devices and times > GROWTH[0]:
            break
        wider = replace(space, cluster=grown)
        plan = _fitting(wider, Pricer(space.model, grown, space.workload))
        if plan:
            return f"{grown.num_devices} devices instead of {space.cluster.num_devices}: {plan}"
    return ""


def _grown(cluster: Cluster, times: int) -> Cluster:
    groups = tuple(replace(group, nodes=group.nodes * times) for group in cluster.groups)
    return replace(cluster, groups=groups, name=f"{times} x {cluster.name}")


def _fitting(space: Space, pricer: Pricer) -> str:
    """The plan of a space that needs least memory, if it fits."""
    found: Found = walk(space, pricer)
    nearest = found.nearest
    if nearest is None or nearest.peak_bytes > pricer.memory_limit_bytes * FIT:
        return ""
    return f"{nearest.plan(space.base).short()} needs {format_bytes(nearest.peak_bytes)}"
