"""What a job may ask of a model's routers under a plan."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.errors import Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan


def routing_problems(
    plan: Plan, model: Model, *, has_losses: bool, capacity_factor: float | None
) -> Iterator[Problem]:
    """Every setting of routers that a model or a plan cannot have, with what would work."""
    if model.experts is None and (has_losses or capacity_factor is not None):
        what = f"settings of routers for {model.name}, which has no experts"
        yield Problem(what, "routers belong to a mixture of experts", "no [moe] section")
    elif capacity_factor is not None and plan.cp > 1:
        rule = "an expert takes the first tokens of a sequence, which one rank must hold whole"
        works = "cp=1, or no capacity_factor: nothing is dropped then"
        yield Problem(f"capacity_factor = {capacity_factor} with cp={plan.cp}", rule, works)
