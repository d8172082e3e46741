"""What an optimizer that works on whole matrices asks of a plan: Muon."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.errors import Problem
from triptych.plan.plan import Plan

MUON = "muon"


def optimizer_problems(plan: Plan, optimizer: str) -> Iterator[Problem]:
    """Every reason why a plan has no rank that holds a matrix whole, with what would work.

    Muon makes a matrix's update orthogonal (Jordan et al. 2024), which no part of it can do alone.
    """
    if optimizer != MUON:
        return
    tensor = max((stage.tensor for stage in plan.stages), default=1)
    if tensor > 1:
        rule = "Muon works on whole matrices, which tensor parallelism cuts"
        yield Problem(f"optimizer=muon with tp={tensor}", rule, "tp=1, or optimizer=adamw")
    if plan.zero > 1:
        rule = "Muon works on whole matrices: ZeRO-1 deals them to the ranks, ZeRO-2 and 3 cut them"
        yield Problem(f"optimizer=muon with zero={plan.zero}", rule, "zero=1, or optimizer=adamw")
