"""Can a model be served under a plan? Without torch: a refusal needs no second of imports."""

from __future__ import annotations

from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.launch import degrees, launch_problem
from triptych.plan.plan import Plan
from triptych.plan.rules import verify


def require_suitable(plan: Plan, model: Model, processes: int) -> None:
    """Raises PlanError with every reason why a model cannot be served under a plan."""
    problems = verify(plan, model)
    if not plan.is_uniform:
        rule = "all stages have the same degrees, and ranks in their order"
        problems.append(Problem(f"the plan has {degrees(plan)} ranks", rule, f"tp={plan.tp}"))
    elif plan.dp > 1 or plan.cp > 1 or plan.chunks > 1:
        what = f"the plan has dp={plan.dp}, cp={plan.cp}, chunks={plan.chunks}"
        rule = "an engine is divided by tensor and pipeline degrees only"
        problems.append(Problem(what, rule, "dp=1, cp=1, chunks=1"))
    if plan.world_size != processes:
        ours = "`triptych generate --plan`, which starts the ranks itself"
        problems.append(launch_problem(plan, processes, f"SCRIPT, or {ours}"))
    if problems:
        raise PlanError(problems)
