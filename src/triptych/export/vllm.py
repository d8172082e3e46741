"""A plan as `vllm serve` with its engine arguments: the part of it that serving has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from triptych.errors import Problem
from triptych.export.target import Account, Export, Subject, commented
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.ranks import placement

_TRAINING = "training only"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
ATTENTION = {"flash": "FLASH_ATTN"}


def impossible_in_vllm(subject: Subject) -> Iterator[Problem]:
    """What vLLM would refuse to start with."""
    plan = subject.plan
    yield from heads_problem(subject.model, plan.tp)
    if plan.precision.parameter not in DTYPES:
        what = f"precision={plan.precision.parameter}"
        yield Problem(what, "vLLM serves in fp32, bf16, fp16 or fp8", "--fix precision=bf16")


def heads_problem(model: Model, tensor: int) -> Iterator[Problem]:
    """What is wrong with so many tensor ranks, if anything."""
    query, kv = model.query_heads, model.kv_heads
    if query % tensor or (kv % tensor and tensor % kv):
        what = f"tp={tensor} for {query} query heads and {kv} KV heads"
        rule = "vLLM divides query heads evenly, and KV heads evenly or not at all"
        yield Problem(what, rule, "--fix tp=1, or another divisor of both")


def export_vllm(subject: Subject) -> Export:
    """The command that serves the model in the degrees of a legal, uniform plan."""
    account = Account(subject)
    plan = subject.plan
    account.say("tp", "pp", "dp", "cp", "ep", "precision.parameter", "layers")
    words = [
        ("vllm", "serve", subject.source or subject.model.name),
        ("--tensor-parallel-size", str(plan.tp)),
        ("--pipeline-parallel-size", str(plan.pp)),
        ("--data-parallel-size", str(plan.dp)),
        ("--dtype", DTYPES[plan.precision.parameter]),
        ("--max-model-len", str(subject.workload.sequence_length)),
        *_optional(account),
    ]
    _not_serving(account)
    notes = account.close(_TRAINING)
    lines = " \\\n    ".join(shlex.join(pair) for pair in words)
    counts = _layers_by_rank(plan)
    if len(set(counts)) > 1:
        lines = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))} {lines}"
    heading = f"# Plan {plan.short()}\n# of {subject.model.name}\n"
    return Export(target="vllm", text=heading + commented(notes) + lines + "\n", notes=notes)


def _optional(account: Account) -> Iterator[tuple[str, ...]]:
    plan = account.subject.plan
    if plan.cp > 1:
        yield "--prefill-context-parallel-size", str(plan.cp)
    if plan.ep > 1:
        yield ("--enable-expert-parallel",)
        whole = plan.tp * plan.cp * plan.dp
        why = f"vLLM spreads experts over all tp x cp x dp = {whole} ranks"
        account.say_or_refuse("ep", plan.ep == whole, why)
    if plan.precision.parameter == "fp8":
        yield "--quantization", "fp8"
    if plan.attention in ATTENTION:
        account.say("attention")
        yield "--attention-backend", ATTENTION[plan.attention]
    if account.subject.nodes > 1 and plan.tp * plan.pp * plan.cp > _per_node(account):
        yield "--nnodes", str(account.subject.nodes)


def _per_node(account: Account) -> int:
    return account.subject.cluster.devices_per_node


def _not_serving(account: Account) -> None:
    if account.subject.plan.attention not in ATTENTION:
        account.refuse("attention", "vLLM chooses a kernel itself")
    account.refuse("sequence_parallel", "vLLM's compiler decides")
    account.refuse("context_method", "vLLM has a method of its own")
    account.refuse("chunks", "a rank's chunks are one stage when serving")
    account.refuse("compile", "vLLM compiles anyway, unless --enforce-eager")


def _layers_by_rank(plan: Plan) -> list[int]:
    """Layers of each pipeline rank, its chunks together."""
    counts = [0] * plan.pp
    for stage, rank in zip(plan.stages, placement(plan), strict=True):
        counts[rank] += stage.num_layers
    return counts
