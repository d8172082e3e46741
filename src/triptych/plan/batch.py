"""The batch equation: global batch = micro-batch x DP x accumulation, and its nearest solutions."""

from __future__ import annotations

from triptych.errors import Problem
from triptych.plan.nearby import divisors, nearest_multiples
from triptych.plan.plan import Plan

RULE = "global batch = microbatch x DP x accumulation, with DP = world / (TP x PP x CP)"


def batch_problem(plan: Plan, global_batch: int, accumulation: int | None = None) -> Problem | None:
    """The broken batch equation in full with the nearest settings that hold; None if it holds.

    `accumulation` is the number of micro-batches a step if the user fixed it; otherwise it is
    derived. DP is the first stage's: its data ranks have `microbatch` sequences each.
    """
    if accumulation is None:
        return _derived(plan, global_batch)
    return _fixed(plan, global_batch, accumulation)


def _sizes(plan: Plan) -> str:
    return f"world={plan.world_size}, TP={plan.tp}, PP={plan.pp}, CP={plan.cp}, DP={plan.dp}"


def _derived(plan: Plan, batch: int) -> Problem | None:
    data, per_round = plan.dp, plan.round_rows
    if batch > 0 and batch % per_round == 0:
        return None
    remedies = [f"microbatch {m}" for m in _near_microbatches(plan.microbatch, data, batch)]
    remedies += [f"global batch {b}" for b in nearest_multiples(batch, per_round)]
    return Problem(
        f"{_sizes(plan)}: global batch {batch} / (microbatch {plan.microbatch} x DP {data}) "
        f"= {batch / per_round:.4g} micro-batches, not a whole number from 1",
        RULE,
        " | ".join(remedies),
    )


def _fixed(plan: Plan, batch: int, accumulation: int) -> Problem | None:
    data, per_round = plan.dp, plan.round_rows
    if batch > 0 and batch == per_round * accumulation:
        return None
    remedies = [f"global batch {per_round * accumulation}"] if accumulation > 0 else []
    if batch > 0 and batch % per_round == 0:
        remedies.append(f"accumulation {batch // per_round}")
    remedies += [
        f"microbatch {m} with accumulation {batch // (m * data)}"
        for m in _near_microbatches(plan.microbatch, data, batch)
    ]
    return Problem(
        f"{_sizes(plan)}: microbatch {plan.microbatch} x DP {data} x accumulation "
        f"{accumulation} = {per_round * accumulation}, but the global batch is {batch}",
        RULE,
        " | ".join(remedies[:3]),
    )


def _near_microbatches(microbatch: int, data: int, batch: int) -> list[int]:
    """The two micro-batches nearest to the asked one that divide the share of a data rank."""
    if batch <= 0 or batch % data:
        return []
    return sorted(divisors(batch // data), key=lambda m: (abs(m - microbatch), m))[:2]
