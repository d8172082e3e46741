"""What limits a placement, and what would be bought by one more device or a looser objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from triptych.fleet.find import Effort, find
from triptych.fleet.judge import Judge, Verdict
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Placement
from triptych.simulate.trace import Trace

LOOSER = 1.25
BUSY = 0.85


class Limit(Enum):
    """Why requests for a model are missed."""

    NOTHING = "nothing: all are served in time"
    OBJECTIVE = "the objective is shorter than one request alone"
    MEMORY = "no group with room for it is left"
    DEVICES = "the groups that hold it are busy"
    BURSTS = "bursts: the groups that hold it are idle most of the time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Attainment as it is and as it would be, on the same requests."""

    now: float
    with_one_more_device: float
    with_looser_objectives: float  # by the factor LOOSER
    limits: Mapping[str, Limit]  # by model, of those that miss requests


def advise(
    fleet: Fleet, placement: Placement, trace: Trace, planned_on: Sequence[Trace], effort: Effort
) -> Advice:
    """Plans again with a device more and with looser objectives; judges all on `trace`."""
    judge = Judge(fleet, [trace])
    verdict = judge.of(placement)
    richer = replace(fleet, num_devices=fleet.num_devices + 1)
    looser = [replace(planned, slo_s=planned.slo_s * LOOSER) for planned in planned_on]
    relaxed = Judge(fleet, [replace(trace, slo_s=trace.slo_s * LOOSER)])
    return Advice(
        now=verdict.attainment,
        with_one_more_device=Judge(richer, [trace])
        .of(find(richer, planned_on, effort).placement)
        .attainment,
        with_looser_objectives=relaxed.of(find(fleet, looser, effort).placement).attainment,
        limits=limits(fleet, placement, verdict, trace),
    )


def limits(fleet: Fleet, placement: Placement, verdict: Verdict, trace: Trace) -> dict[str, Limit]:
    """Of each model that misses requests, why."""
    return {
        model.name: _limit(index, fleet, placement, verdict, trace)
        for index, model in enumerate(fleet.models)
        if verdict.missed[index]
    }


def _limit(model: int, fleet: Fleet, placement: Placement, verdict: Verdict, trace: Trace) -> Limit:
    objective_s = float(trace.slo_s[trace.model == model].max()) - fleet.overhead_s
    if all(sum(p.stage_s) > objective_s for p in fleet.models[model].profiles.values()):
        return Limit.OBJECTIVE
    groups = placement.groups
    holders = [i for i, group in enumerate(groups) if model in group.models]
    if not holders or (len(holders) < len(groups) and not _has_room(model, fleet, placement)):
        return Limit.MEMORY
    busy = min(float(verdict.utilisation[i]) for i in holders)
    return Limit.DEVICES if busy > BUSY else Limit.BURSTS


def _has_room(model: int, fleet: Fleet, placement: Placement) -> bool:
    return any(group.takes(model, fleet) for group in placement.groups)
