"""When nothing fits: the plan that needs least memory, and the changes that would make one fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from triptych.cluster.catalogue import devices
from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict_with
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.plan.plan import Plan, counts_text
from triptych.search.best_first import BestFirst
from triptych.search.objective import Objective
from triptych.search.options import FIT, Option
from triptych.search.pins import Pins
from triptych.search.space import Space
from triptych.units import format_bytes, format_seconds

GROWTH = (2, 4, 8, 16)
"""Times as many devices that are tried."""

SHORTER = (2, 4, 8)
"""Parts of the sequence length that are tried."""

OFFLOADS = ("optimizer", "activations")

_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The least-bad plan: what it needs, what is missing, what would fit."""

    plan: Plan
    prediction: Prediction
    needed_bytes: int  # of a device: the peak of the largest rank with what it has to leave free
    over_bytes: int  # beyond a device's memory
    changes: tuple[str, ...]  # each would make a plan fit

    def to_json(self) -> dict[str, Any]:
        """The prediction with what is missing."""
        return self.prediction.to_json() | {
            "needed_bytes": self.needed_bytes,
            "over_bytes": self.over_bytes,
            "changes": list(self.changes),
        }


def closest(space: Space, pricer: Pricer) -> Closest:
    """The least-bad plan of a space with legal plans of which none fits."""
    nearest = smallest(space, pricer)
    assert nearest is not None, "a space with legal plans has a smallest one"
    needed_bytes = nearest.peak_bytes * (1 + space.spare)
    needed = -int(-needed_bytes // _KIB) * _KIB  # rounded up, so that this much does fit
    return Closest(
        plan=nearest.plan,
        prediction=predict_with(pricer, nearest.plan, with_timeline=False),
        needed_bytes=needed,
        over_bytes=needed - int(pricer.memory_limit_bytes),
        changes=tuple(_changes(space, pricer, needed)),
    )


def smallest(space: Space, pricer: Pricer) -> Option | None:
    """The plan of a space that needs least memory, whether it fits or not."""
    objective = Objective(name="memory")
    found = BestFirst(space, pricer, objective, lambda option: True, limit_bytes=float("inf"))
    return next(iter(found.leaders(1)), None)


def _changes(space: Space, pricer: Pricer, needed: int) -> Iterator[str]:
    """Changes that make a plan fit, each with that plan's need; cheap ones first."""
    yield from _tighter(space, pricer)
    yield from _unpinned(space, pricer)
    yield from _offloaded(space, pricer)
    if space.runnable_only:
        plan = _fitting(replace(space, runnable_only=False), pricer)
        yield from (f"priced, not runnable here: {plan}" for plan in plan)
    yield from _shorter(space)
    yield from _more_devices(space)
    large = _such_as(space, needed)
    yield f"devices with at least {format_bytes(needed)} each ({needed} bytes){large}"


def _tighter(space: Space, pricer: Pricer) -> Iterator[str]:
    """Less memory left free, if a plan fits at all."""
    option = smallest(space, pricer)
    if option is not None and option.peak_bytes <= pricer.memory_limit_bytes:
        spare = pricer.memory_limit_bytes / option.peak_bytes - 1
        yield (
            f"--spare {int(1000 * spare) / 10:g}, within the error bar of the memory model: "
            f"{option.plan.short()} fits with {spare:.1%} to spare"
        )


def _unpinned(space: Space, pricer: Pricer) -> Iterator[str]:
    """Pins that stand in the way on their own; all of them, if no one does alone."""
    alone = False
    for name, value in space.pins.values.items():
        for plan in _fitting(_with_pins(space, space.pins.without(name)), pricer):
            alone = True
            yield f"without {name}={_word(value)}: {plan}"
    if not alone and len(space.pins.values) > 1:
        for plan in _fitting(_with_pins(space, Pins(values={})), pricer):
            pins = ",".join(f"{name}={_word(v)}" for name, v in space.pins.values.items())
            yield f"without {pins}: {plan}"


def _word(value: object) -> str:
    """The value of a pin as a user writes it."""
    return counts_text(value) if isinstance(value, tuple) else str(value)


def _offloaded(space: Space, pricer: Pricer) -> Iterator[str]:
    """What waits in host memory; the time of moving it is not priced, so it is not searched."""
    if "offload" in space.pins.values:
        return
    for what in OFFLOADS:
        pins = Pins(values={**space.pins.values, "offload": what})
        for plan in _fitting(_with_pins(space, pins), pricer):
            yield f"with offload={what}, whose time is not priced: {plan}"


def _with_pins(space: Space, pins: Pins) -> Space:
    return replace(space, pins=pins, base=pins.base_plan(space.model, space.cluster))


def _shorter(space: Space) -> Iterator[str]:
    """The longest shorter sequences with which a plan fits."""
    for parts in SHORTER:
        length, rest = divmod(space.workload.sequence_length, parts)
        if rest or not length:
            return
        workload = replace(space.workload, sequence_length=length)
        shorter = replace(space, workload=workload)
        for plan in _fastest(shorter, Pricer(space.model, space.cluster, workload)):
            yield f"sequences of {length} tokens: {plan}"
            return


def _more_devices(space: Space) -> Iterator[str]:
    """The smallest larger cluster of the same nodes on which a plan fits."""
    for times in GROWTH:
        grown = _grown(space.cluster, times)
        wider = replace(space, cluster=grown)
        for plan in _fastest(wider, Pricer(space.model, grown, space.workload)):
            yield f"{grown.num_devices} devices instead of {space.cluster.num_devices}: {plan}"
            return


def _such_as(space: Space, needed: int) -> str:
    """The smallest device of the same kind that has so many bytes, if the catalogue knows one."""
    kind = space.cluster.device.kind
    large = [d for d in devices().values() if d.kind == kind and d.memory_bytes >= needed]
    if not large:
        return ""
    return f", as {min(large, key=lambda device: (device.memory_bytes, device.name)).name} has"


def _grown(cluster: Cluster, times: int) -> Cluster:
    groups = tuple(replace(group, nodes=group.nodes * times) for group in cluster.groups)
    return replace(cluster, groups=groups, name=f"{times} x {cluster.name}")


def _fastest(space: Space, pricer: Pricer) -> Iterator[str]:
    """The fastest plan of a space that fits, if one does."""
    for option in BestFirst(space, pricer, Objective(), lambda option: True).leaders(1):
        seconds, needed = format_seconds(option.step_s), format_bytes(option.peak_bytes)
        yield f"{option.plan.short()} takes {seconds} a step, needs {needed}"


def _fitting(space: Space, pricer: Pricer) -> Iterator[str]:
    """The plan of a space that needs least memory, if it fits."""
    option = smallest(space, pricer)
    room_bytes = space.room_bytes(pricer.memory_limit_bytes)
    if option is not None and option.peak_bytes <= room_bytes * FIT:
        yield f"{option.plan.short()} needs {format_bytes(option.peak_bytes)}"
