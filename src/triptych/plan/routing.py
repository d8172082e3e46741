"""Which shards experts may have, and what a job may ask of a model's routers under a plan."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.errors import Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan, Stage


def expert_shard_problems(plan: Plan, stage: Stage) -> Iterator[Problem]:
    """A ZeRO shard set that does not hold every expert of a stage, if there is one."""
    shards = plan.hybrid_shard if plan.zero else 0
    if shards % stage.expert:
        what = f"ep={stage.expert} with hybrid_shard={shards}"
        rule = "the ranks that share one ZeRO shard set hold every expert as often"
        yield Problem(what, rule, f"hybrid_shard=0, or a multiple of {stage.expert}")


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
