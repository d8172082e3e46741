"""Which values the settings of a plan may have, alone and together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from triptych.errors import Problem
from triptych.plan.fields import PRECISION, SETTINGS, value_problem
from triptych.plan.nearby import divisors
from triptych.plan.plan import VERSION, Plan


def setting_problems(plan: Plan) -> Iterator[Problem]:
    """Settings that no model and no cluster could make legal."""
    if plan.version != VERSION:
        yield Problem(
            f"version = {plan.version!r}", "the version of a plan is known", f"version = {VERSION}"
        )
    named = [(key, getattr(plan, key), field) for key, field in SETTINGS.items()]
    named += [
        (f"precision.{key}", getattr(plan.precision, key), field)
        for key, field in PRECISION.items()
    ]
    for key, value, field in named:
        problem = value_problem(key, value, field)
        if problem:
            yield problem
    data = [stage.data for stage in plan.stages]
    if plan.hybrid_shard > 0 and data and min(data) > 0 and math.gcd(*data) % plan.hybrid_shard:
        degrees = " and ".join(map(str, dict.fromkeys(data)))
        yield Problem(
            f"hybrid_shard={plan.hybrid_shard} with dp={degrees}",
            "the ranks that share one ZeRO shard set divide the data axis",
            "hybrid_shard in " + ", ".join(map(str, [0, *divisors(math.gcd(*data))])),
        )
    if plan.accumulation == "reduce_each" and plan.zero in (0, 1):
        yield Problem(
            f"accumulation=reduce_each with zero={plan.zero}",
            "only ZeRO-2 and 3 divide gradients, so only they can reduce each micro-batch's",
            "accumulation=auto, or zero=2 or 3",
        )
    if plan.recompute == "none" and plan.recompute_every > 1:
        yield Problem(
            f"recompute_every={plan.recompute_every} with recompute=none",
            "it says which layers are recomputed, so something must be",
            "recompute=full, or recompute_every=1",
        )
    if plan.shard_activations and not shards_activations(plan):
        yield Problem(
            f"shard_activations=1 with recompute={plan.recompute}, "
            f"sequence_parallel={int(plan.sequence_parallel)}",
            "it divides the inputs of recomputed layers over several tensor ranks that each hold "
            "all of them",
            "recompute=full with tp from 2 and no sequence parallelism, which divides them anyway",
        )
    if plan.offload == "activations" and plan.recompute != "full":
        yield Problem(
            f"offload=activations with recompute={plan.recompute}",
            "what goes to host memory are the inputs of recomputed layers",
            "recompute=full",
        )


def shards_activations(plan: Plan) -> bool:
    """True if the inputs of recomputed layers can be divided over the tensor ranks."""
    is_split = all(stage.tensor > 1 for stage in plan.stages)
    return plan.recompute == "full" and is_split and not plan.sequence_parallel
