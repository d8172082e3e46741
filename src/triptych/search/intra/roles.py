"""Layouts that have a name: what each kind of parallelism does to every operator of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.model.operator import Operator
from triptych.plan.plan import Plan, Stage
from triptych.search.intra.block import Layer
from triptych.search.intra.found import Axis
from triptych.search.intra.modes import (
    COLUMN,
    DATA,
    EXPERTS,
    FEATURES,
    HEADS,
    ROW,
    SEQUENCE,
    WHOLE,
    Mode,
    modes,
)

DATA_AXIS, EXPERT_AXIS, CONTEXT_AXIS = "data", "expert", "context"
TENSOR_AXIS, TENSOR_SP_AXIS = "tensor", "tensor+sequence"

ROLES = (DATA_AXIS, EXPERT_AXIS, TENSOR_SP_AXIS, TENSOR_AXIS, CONTEXT_AXIS)
"""What an axis of a plan's mesh does; context parallelism as Ulysses has it."""

FREE = ("router", "shared_gate", "q_down", "kv_down", "q_norm", "kv_norm")
"""Small products that layouts with a name do one way or another."""


def stage_axes(plan: Plan, stage: Stage) -> tuple[Axis, ...]:
    """The mesh of a stage, tensor neighbours last; axes of one rank are left out."""
    tensor = TENSOR_SP_AXIS if plan.sequence_parallel else TENSOR_AXIS
    inside = min(stage.expert, stage.data)  # experts may also be dealt over context ranks
    axes = (
        Axis(DATA_AXIS, stage.data // inside),
        Axis(EXPERT_AXIS, inside),
        Axis(CONTEXT_AXIS, stage.context),
        Axis(tensor, stage.tensor),
    )
    return tuple(axis for axis in axes if axis.size > 1)


def role_mode(op: Operator, role: str) -> Mode | None:
    """What an axis with a role does to an operator; None if the role leaves it open."""
    if role == DATA_AXIS:
        return DATA
    if role == EXPERT_AXIS:
        return _expert_mode(op)
    if role == CONTEXT_AXIS:
        return HEADS if op.kind == "attention" else SEQUENCE
    return _tensor_mode(op, is_sequence=role == TENSOR_SP_AXIS)


def _expert_mode(op: Operator) -> Mode:
    if op.name in ("dispatch", "combine"):
        reads = "B" if op.name == "dispatch" else "E"
        return next(
            m for m in modes(op) if m.exchanges and "B" in (m.reads, m.writes) and m.reads == reads
        )
    return EXPERTS if op.name.startswith("experts_") else DATA


def _tensor_mode(op: Operator, *, is_sequence: bool) -> Mode | None:
    """Megatron-LM's: columns, then rows; tokens or nothing outside of the products."""
    if op.name in FREE:
        return None
    if op.name in ("dispatch", "combine"):
        return next(m for m in modes(op) if m.name.startswith("partial"))
    if op.kind == "attention" or op.split == "heads":
        return HEADS
    if op.split == "column":
        return COLUMN if op.kind == "gemm" else FEATURES
    if op.split == "row":
        return ROW
    return SEQUENCE if is_sequence else WHOLE


def named(layer: Layer, choice: Sequence[int]) -> tuple[str, ...] | None:
    """The role of each axis under a choice of strategies; None if one has no name."""
    found = []
    for axis in range(len(layer.axes)):
        chosen = [s[i][axis] for s, i in zip(layer.strategies, choice, strict=True)]
        pairs = list(zip(layer.operators, chosen, strict=True))
        role = next((r for r in ROLES if _has_role(pairs, r)), None)
        if role is None:
            return None
        found.append(role)
    return tuple(found)


def _has_role(pairs: Sequence[tuple[Operator, Mode]], role: str) -> bool:
    return all(role_mode(op, role) in (None, mode) for op, mode in pairs)


def best_with(layer: Layer, roles: Sequence[str]) -> list[list[int]] | None:
    """For each operator the strategies that some roles leave open; None if they are illegal."""
    allowed = []
    for op, strategies in zip(layer.operators, layer.strategies, strict=True):
        wanted = [role_mode(op, role) for role in roles]
        found = [
            index
            for index, strategy in enumerate(strategies)
            if all(want in (None, mode) for want, mode in zip(wanted, strategy, strict=True))
        ]
        if not found:
            return None
        allowed.append(found)
    return allowed
