"""What each decision of a found plan saves against a hand-made one: it is taken back alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.step import Priced, step_seconds
from triptych.cost.storage import Storage
from triptych.plan.plan import Plan, Stage, counts_text, even_split
from triptych.plan.rules import verify
from triptych.search.options import FIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A setting of the found plan, what the hand-made plan has there, and the seconds it saves.

    `saved_s` is None where the other value cannot be: `reason` says why.
    """

    name: str
    value: str
    instead: str
    saved_s: float | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {
            "name": self.name,
            "value": self.value,
            "instead": self.instead,
            "saved_s": self.saved_s,
            "reason": self.reason,
        }


def decisions(pricer: Pricer, plan: Plan, hand: Plan, spare: float = 0.0) -> tuple[Decision, ...]:
    """Every decision in which a plan differs from a hand-made one, taken back one at a time."""
    step_s = _step_s(pricer, plan)
    found = []
    for name, value, instead, other in _taken_back(pricer, plan, hand):
        saved_s, reason = None, "that plan is not legal"
        if not verify(other, pricer.model, pricer.cluster, pricer.workload):
            saved_s, reason = _step_s(pricer, other) - step_s, ""
            if not fits(pricer, other, spare):
                saved_s, reason = None, "that does not fit in memory"
        found.append(
            Decision(name=name, value=value, instead=instead, saved_s=saved_s, reason=reason)
        )
    return tuple(found)


def fits(pricer: Pricer, plan: Plan, spare: float = 0.0) -> bool:
    """True if every rank fits its own devices with a part of its peak to spare."""
    frame, storage = Frame.of(pricer, plan), Storage.of(plan)
    rank = frame.fullest_rank(storage, plan.schedule)
    limit_bytes = frame.pricers[rank].memory_limit_bytes / (1 + spare)
    return frame.memory(rank, storage, plan.schedule).total_bytes <= FIT * limit_bytes


def _step_s(pricer: Pricer, plan: Plan) -> float:
    frame = Frame.of(pricer, plan)
    return step_seconds(frame, Priced.of(frame, Storage.of(plan)), plan.schedule)


def _taken_back(pricer: Pricer, plan: Plan, hand: Plan) -> Iterator[tuple[str, str, str, Plan]]:
    """Name, value, the hand-made plan's value, and the plan with that."""
    layers = pricer.model.num_layers
    counts = [stage.num_layers for stage in plan.stages]
    even = even_split(layers, len(counts))
    if tuple(counts) != even:
        yield "layers", counts_text(counts), counts_text(even), _with_layers(plan, even)
    for name in ("data", "tensor", "context", "expert"):
        own, other = _text(plan, name), str(getattr(hand.stages[0], name))
        if own != other:
            yield name, own, other, _with_degree(plan, name, int(other))
    if any(stage.devices for stage in plan.stages):
        stages = tuple(replace(stage, devices=()) for stage in plan.stages)
        yield "devices", "listed", "in rank order", plan.with_(stages=stages)
    for key in ("recompute", "zero", "sequence_parallel", "schedule"):
        own, other = getattr(plan, key), getattr(hand, key)
        if own != other:
            changes = {key: other} | ({"recompute_every": 1} if other == "none" else {})
            yield key, str(own), str(other), plan.with_(**changes)
    if plan.round_rows != hand.round_rows:
        rows = max(1, hand.round_rows // plan.dp)
        yield "microbatch", str(plan.microbatch), str(rows), plan.with_(microbatch=rows)


def _text(plan: Plan, name: str) -> str:
    values = [str(getattr(stage, name)) for stage in plan.stages[: plan.pp]]
    return values[0] if len(set(values)) == 1 else "+".join(values)


def _with_layers(plan: Plan, counts: tuple[int, ...]) -> Plan:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    stages = (
        replace(stage, start=start, stop=start + count)
        for stage, start, count in zip(plan.stages, starts, counts, strict=True)
    )
    return plan.with_(stages=tuple(stages))


def _with_degree(plan: Plan, name: str, degree: int) -> Plan:
    """Every stage with the same degree; data ranks, or tensor ranks, make up for it."""
    other = {"data": "tensor", "tensor": "data", "context": "data"}.get(name)
    stages = []
    for stage in plan.stages:
        changed = _degree(stage, name, degree)
        if other:
            rest = stage.num_devices // max(1, changed.num_devices // getattr(stage, other))
            changed = _degree(changed, other, max(1, rest))
        stages.append(changed)
    microbatch = max(1, plan.round_rows // stages[0].data)
    return plan.with_(stages=tuple(stages), microbatch=microbatch)


def _degree(stage: Stage, name: str, degree: int) -> Stage:
    changes: dict[str, Any] = {name: degree}
    return replace(stage, **changes)
