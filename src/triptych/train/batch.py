"""The batch of a job under a plan: global_batch = microbatch x DP x accumulation."""

from __future__ import annotations

from triptych.errors import Problem
from triptych.plan.batch import batch_problem
from triptych.plan.plan import Plan


def fit_batch(
    plan: Plan,
    global_batch: int,
    *,
    microbatch: int | None = None,
    accumulation: int | None = None,
    plan_says: bool = False,
) -> tuple[Plan, list[Problem]]:
    """The plan with the micro-batch that the job asks for, or that its accumulation leaves; and
    what is wrong with it: the whole equation with the nearest settings that hold.

    `plan_says` is True if the plan itself names its micro-batch rather than having the default.
    """
    if plan_says and microbatch not in (None, plan.microbatch):
        what = f"[train] microbatch = {microbatch}, but the plan says {plan.microbatch}"
        works = f"[train] microbatch = {plan.microbatch}, or none in the job"
        return plan, [Problem(what, "job and plan agree", works)]
    if microbatch is None and accumulation is not None and not plan_says:
        microbatch = max(1, round(global_batch / (plan.dp * accumulation)))
    fitted = plan.with_(microbatch=microbatch or plan.microbatch)
    problem = batch_problem(fitted, global_batch, accumulation)
    return fitted, [problem] if problem else []
