"""The batch equation: global batch = micro-batch x DP x accumulation, and its nearest solutions."""

from __future__ import annotations

from triptych.errors import Problem
from triptych.plan.nearby import divisors, nearest_multiples
from triptych.plan.plan import Plan

RULE = "global batch = microbatch x DP x accumulation, with DP = world / (TP x PP x CP)"


def batch_problem(
    plan: Plan, global_batch: int, accumulation: int | None = None, *, data: int | None = None
) -> Problem | None:
    """The broken batch equation in full with the nearest settings that hold; None if it holds.

    `accumulation` is the number of micro-batches a step if the user fixed it; otherwise it is
    derived. `data` is the data degree, if it is not the first stage's.
    """
    data = data or plan.dp
    if accumulation is None:
        return _derived(plan, data, global_batch)
    return _fixed(plan, data, global_batch, accumulation)


def _sizes(plan: Plan, data: int) -> str:
    return f"world={plan.world_size}, TP={plan.tp}, PP={plan.pp}, CP={plan.cp}, DP={data}"


def _derived(plan: Plan, data: int, batch: int) -> Problem | None:
    per_round = plan.microbatch * data
    if batch > 0 and batch % per_round == 0:
        return None
    remedies = [f"microbatch {m}" for m in _near_microbatches(plan.microbatch, data, batch)]
    remedies += [f"global batch {b}" for b in nearest_multiples(batch, per_round)]
    return Problem(
        f"{_sizes(plan, data)}: global batch {batch} / (microbatch {plan.microbatch} x DP {data}) "
        f"= {batch / per_round:.4g} micro-batches, not a whole number from 1",
        RULE,
        " | ".join(remedies),
    )


def _fixed(plan: Plan, data: int, batch: int, accumulation: int) -> Problem | None:
    per_round = plan.microbatch * data
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
        f"{_sizes(plan, data)}: microbatch {plan.microbatch} x DP {data} x accumulation "
        f"{accumulation} = {per_round * accumulation}, but the global batch is {batch}",
        RULE,
        " | ".join(remedies[:3]),
    )


def _near_microbatches(microbatch: int, data: int, batch: int) -> list[int]:
    """The two micro-batches nearest to the asked one that divide the share of a data rank."""
    if batch <= 0 or batch % data:
        return []
    return sorted(divisors(batch // data), key=lambda m: (abs(m - microbatch), m))[:2]
