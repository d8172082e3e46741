"""A launch and a plan: as many processes as ranks."""

from __future__ import annotations

from triptych.errors import Problem
from triptych.plan.plan import Plan


def degrees(plan: Plan) -> str:
    """The equation of a plan's ranks: `TP=2 x PP=1 x CP=1 x DP=2 = 4`."""
    if plan.is_uniform:
        text = f"TP={plan.tp} x PP={plan.pp} x CP={plan.cp} x DP={plan.dp}"
    else:
        text = " + ".join(
            f"TP={s.tensor} x CP={s.context} x DP={s.data}" for s in plan.stages[: plan.pp]
        )
    return f"{text} = {plan.world_size}"


def launch_problem(plan: Plan, processes: int, command: str) -> Problem:
    """That a plan has another number of ranks than were launched, with the `command` to launch."""
    started = "only one process exists" if processes == 1 else f"{processes} processes exist"
    return Problem(
        f"{started} in this launch, but the plan has {degrees(plan)} ranks",
        "the launch has as many processes as the plan has ranks",
        f"torchrun --nproc-per-node={plan.world_size} {command}",
    )
