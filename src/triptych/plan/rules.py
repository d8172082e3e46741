"""Which plans are legal: the one place that knows. Plan, train, search and serve all ask here.

`verify` lists every broken rule at once, each with values that would work. `unrunnable` says
why a legal plan can be priced but not yet run.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.cluster.cluster import Cluster
from triptych.errors import PlanError, Problem
from triptych.model.model import Attention, Model
from triptych.plan.batch import batch_problem
from triptych.plan.context import heads_problems
from triptych.plan.families import FAMILIES
from triptych.plan.fields import DTYPES, PRECISION, RANK_ORDER
from triptych.plan.matrices import optimizer_problems
from triptych.plan.nearby import (
    Asked,
    divisors,
    listed,
    nearest_multiples,
    splits_heads,
    tensor_limit,
    usable_tensor_degrees,
    works,
)
from triptych.plan.plan import Plan
from triptych.plan.routing import expert_shard_problems
from triptych.plan.settings import setting_problems
from triptych.plan.stage_rules import STAGE_RULES
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS, microbatches_problem

__all__ = [
    "batch_problem",
    "require_legal",
    "unrunnable",
    "usable_tensor_degrees",
    "verify",
]

RUNNABLE_FAMILIES = tuple(FAMILIES)
RUNNABLE_DTYPES = ("fp64", "fp32", "bf16", "fp16")
RUNNABLE_OFFLOADS = ("none", "optimizer", "activations")


def verify(
    plan: Plan, model: Model, cluster: Cluster | None = None, workload: Workload | None = None
) -> list[Problem]:
    """Every rule that a plan breaks, with values that work; empty for a legal plan.

    Without a cluster the number of devices is not checked, without a workload neither is the
    batch nor the sequence.
    """
    broken = [*setting_problems(plan)]
    if not plan.stages or any(_degrees_below_one(plan)) or min(plan.chunks, plan.microbatch) < 1:
        return [*broken, *_stage_counts(plan)]  # nothing else can be counted
    asked = Asked(plan=plan, model=model, cluster=cluster, workload=workload)
    for rule in _RULES:
        broken += rule(asked)
    return broken


def require_legal(
    plan: Plan, model: Model, cluster: Cluster | None = None, workload: Workload | None = None
) -> None:
    """Returns if the plan is legal. Raises PlanError with every broken rule otherwise."""
    broken = verify(plan, model, cluster, workload)
    if broken:
        raise PlanError(broken)


def _degrees_below_one(plan: Plan) -> Iterator[bool]:
    for stage in plan.stages:
        yield min(stage.data, stage.tensor, stage.context, stage.expert) < 1


def _stage_counts(plan: Plan) -> Iterator[Problem]:
    if not plan.stages:
        yield Problem("the plan has no stages", "a plan has at least one stage", "pp=1")
    for index, (stage, is_bad) in enumerate(
        zip(plan.stages, _degrees_below_one(plan), strict=True)
    ):
        if is_bad:
            yield Problem(
                f"stage {index} has degrees data={stage.data}, tensor={stage.tensor}, "
                f"context={stage.context}, expert={stage.expert}",
                "every degree is a whole number from 1",
                "1",
            )


# --- stages ------------------------------------------------------------------------------------


def _microbatches(asked: Asked) -> Iterator[Problem]:
    plan, workload = asked.plan, asked.workload
    if workload is None or plan.schedule not in TRAITS or len(plan.stages) % plan.chunks:
        return
    count, rest = divmod(workload.global_batch, plan.round_rows)
    if count < 1 or rest:  # `_batch` says so
        return
    if problem := microbatches_problem(plan.schedule, plan.pp, count):
        yield problem


# --- tensor and expert parallelism -------------------------------------------------------------


def _tensor_degrees(plan: Plan) -> list[int]:
    return sorted({stage.tensor for stage in plan.stages})


def _tensor_remedy(asked: Asked) -> str:
    limit = asked.cluster.num_devices if asked.cluster else asked.model.query_heads
    usable = usable_tensor_degrees(asked.model, limit)
    whole = works(asked, ("tp", "dp"), ("tp", "pp", "dp"), ("tp", "pp", "dp", "microbatch"))
    if asked.cluster is None:
        return f"tp in {listed(usable)}"
    fitting = [t for t in usable if asked.cluster.num_devices % t == 0]
    text = f"tp in {listed(fitting)} on {asked.cluster.num_devices} devices"
    return f"{text}; for example {whole}" if whole else text


def _heads(asked: Asked) -> Iterator[Problem]:
    for tensor in _tensor_degrees(asked.plan):
        for attention in dict.fromkeys(block.attention for block in asked.model.blocks):
            if not splits_heads(attention, tensor):
                yield Problem(
                    f"tp={tensor} for {asked.model.name} with {_head_text(attention)}",
                    f"tp is at most the {attention.kv_heads} KV heads (shares may be uneven), or a "
                    "multiple of them by which the query heads of each KV head divide",
                    _tensor_remedy(asked),
                )


def _head_text(attention: Attention) -> str:
    return f"{attention.query_heads} query heads and {attention.kv_heads} KV heads"


def _widths(asked: Asked) -> Iterator[Problem]:
    limit = tensor_limit(asked.model)
    for tensor in _tensor_degrees(asked.plan):
        if tensor > limit:
            yield Problem(
                f"tp={tensor}, but the narrowest of MLP width and vocabulary is {limit}",
                "every rank holds some of the MLP width and of the vocabulary",
                _tensor_remedy(asked),
            )


def _context_heads(asked: Asked) -> Iterator[Problem]:
    yield from heads_problems(asked.plan, asked.model)


def _experts(asked: Asked) -> Iterator[Problem]:
    plan, experts = asked.plan, asked.model.experts
    if all(stage.expert == 1 for stage in plan.stages):
        return
    remedy = works(asked, ("ep",), ("ep", "tp", "dp"), ("ep", "tp", "pp", "dp"), most=6)
    if experts is None:
        yield Problem(
            f"ep={plan.ep}, but {asked.model.name} has no experts",
            "expert parallelism needs a mixture of experts",
            "ep=1",
        )
        return
    for stage in dict.fromkeys(plan.stages):
        if experts.count % stage.expert:
            yield Problem(
                f"ep={stage.expert} for {experts.count} experts",
                "ep divides the number of experts",
                remedy or f"ep in {listed(divisors(experts.count))}",
            )
        yield from expert_shard_problems(plan, stage)
        if (stage.data * stage.context) % stage.expert:
            yield Problem(
                f"ep={stage.expert} with dp={stage.data} x cp={stage.context}",
                "ep divides dp x cp: expert parallelism lives inside them",
                remedy or f"ep in {listed(divisors(stage.data * stage.context))}",
            )


# --- devices -----------------------------------------------------------------------------------


def _world(asked: Asked) -> Iterator[Problem]:
    plan, cluster = asked.plan, asked.cluster
    if cluster is None or plan.world_size == cluster.num_devices:
        return
    remedy = works(
        asked,
        ("dp",),
        ("dp", "microbatch"),
        ("tp", "pp", "dp"),
        ("tp", "pp", "dp", "microbatch"),
        ("tp", "pp", "cp", "dp", "microbatch"),
    )
    resize = f"or a cluster of {plan.world_size} devices"
    yield Problem(
        f"{_equation(plan)} ranks, but cluster '{cluster.name}' has {cluster.num_devices} devices",
        "tp x pp x cp x dp = devices of the cluster",
        f"{remedy}; {resize}" if remedy else resize.removeprefix("or "),
    )


def _equation(plan: Plan) -> str:
    if plan.is_uniform:
        degrees = f"tp={plan.tp} x pp={plan.pp} x cp={plan.cp} x dp={plan.dp}"
    else:
        degrees = " + ".join(f"{s.tensor} x {s.context} x {s.data}" for s in plan.stages[: plan.pp])
        degrees = f"sum over stages of tensor x context x data: {degrees}"
    return f"{degrees} = {plan.world_size}"


# --- batch and sequence ------------------------------------------------------------------------


def _batch(asked: Asked) -> Iterator[Problem]:
    if asked.workload is not None:
        problem = batch_problem(asked.plan, asked.workload.global_batch)
        if problem:
            yield problem


def _optimizer(asked: Asked) -> Iterator[Problem]:
    if asked.workload is not None:
        yield from optimizer_problems(asked.plan, asked.workload.optimizer)


def _sequence(asked: Asked) -> Iterator[Problem]:
    plan, workload = asked.plan, asked.workload
    if workload is None:
        return
    length = workload.sequence_length
    for cp, tp in dict.fromkeys((stage.context, stage.tensor) for stage in plan.stages):
        parts = cp * (tp if plan.sequence_parallel else 1)
        if length >= 1 and length % parts == 0:
            continue
        by = f"cp={cp}" + (f" x tp={tp}" if plan.sequence_parallel else "")
        lengths = " or ".join(f"sequence length {n}" for n in nearest_multiples(length, parts))
        off = " or sequence_parallel off" if plan.sequence_parallel and not length % cp else ""
        yield Problem(
            f"sequence length {length} over {by}",
            "context and sequence parallelism divide the sequence evenly",
            lengths + off,
        )
    if asked.model.learned_positions and length > asked.model.max_position:
        yield Problem(
            f"sequence length {length} for {asked.model.name}",
            f"the model has learned positions up to {asked.model.max_position} only",
            f"sequence length {asked.model.max_position}",
        )


_RULES = (
    *STAGE_RULES,
    _heads,
    _widths,
    _context_heads,
    _experts,
    _world,
    _batch,
    _microbatches,
    _optimizer,
    _sequence,
)


# --- what runs today ---------------------------------------------------------------------------


def unrunnable(plan: Plan, model: Model) -> list[str]:
    """Why a legal plan can be priced but not run today; empty if it runs."""
    return list(_unrunnable(plan, model))


def _unrunnable(plan: Plan, model: Model) -> Iterator[str]:
    plain = (
        (plan.offload not in RUNNABLE_OFFLOADS, f"offload={plan.offload}"),
        (plan.attention != "sdpa", f"attention={plan.attention}"),
        (plan.rank_order != RANK_ORDER, f"rank order {plan.rank_order}"),
        (bool(plan.layouts), "layouts per tensor"),
        (model.family not in RUNNABLE_FAMILIES, f"model family '{model.family}'"),
    )
    yield from (reason for is_used, reason in plain if is_used)
    for key in PRECISION:
        dtype = getattr(plan.precision, key)
        if dtype in DTYPES and dtype not in RUNNABLE_DTYPES:
            yield f"{key} in {dtype}"
