"""A plan as a Megatron-LM launch script: `torchrun pretrain_gpt.py` with its arguments.

Names and rules are those of `megatron/training/arguments.py` (its parser and `validate_args`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from triptych.errors import Problem
from triptych.export.megatron_model import model_arguments
from triptych.export.target import Account, Export, Subject, commented
from triptych.plan.plan import Plan
from triptych.units import DTYPE_BYTES

ATTENTION = {"sdpa": "auto", "eager": "unfused", "flash": "flash"}
CONTEXT = {"ring": "p2p", "ulysses": "a2a"}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
MOMENTS = ("fp32", "fp16", "bf16", "fp8")

_NO_SETTING = "Megatron-LM has no such setting"

Words = Iterator[tuple[str, ...]]


def export_megatron(subject: Subject) -> Export:
    """The launch script of a legal, uniform plan that `impossible_in_megatron` has nothing against.

    One node runs it as it is; several nodes run it each, with NODE_RANK and MASTER_ADDR set.
    """
    account = Account(subject)
    arguments = [
        *model_arguments(account),
        *_batch(account),
        *_parallel(account),
        *_pipeline(account),
        *_data(account),
        *_recompute(account),
        *_precision(account),
        *_attention(account),
    ]
    notes = account.close(_NO_SETTING)
    lines = " \\\n".join("    " + shlex.join(words) for words in arguments)
    return Export(
        target="megatron",
        text=_SCRIPT.format(
            plan=subject.plan.short(),
            model=subject.model.name,
            notes=commented(notes),
            connections=_connections(subject.plan),
            nodes=subject.nodes,
            per_node=subject.cluster.devices_per_node,
            arguments=lines,
        ),
        notes=notes,
    )


_SCRIPT = """#!/usr/bin/env bash
# Plan {plan}
# of {model}. Data, learning rate and all else follow as arguments of this script.
{notes}set -euo pipefail
{connections}
torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank "${{NODE_RANK:-0}}" \\
    --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
    pretrain_gpt.py \\
{arguments} \\
    "$@"
"""


def _connections(plan: Plan) -> str:
    """Before Blackwell Megatron-LM wants one queue with TP or CP, and several with its FSDP."""
    if plan.zero >= 2:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS"
    return 'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"'


def impossible_in_megatron(subject: Subject) -> Iterator[Problem]:
    """What Megatron-LM would refuse to start with."""
    plan, model = subject.plan, subject.model
    heads = {(b.attention.query_heads, b.attention.kv_heads) for b in model.blocks}
    for query, kv in sorted(heads):
        if query % plan.tp or (kv % plan.tp and plan.tp % kv):
            what = f"tp={plan.tp} for {query} query heads and {kv} KV heads"
            rule = "Megatron-LM divides query heads evenly, and KV heads evenly or not at all"
            yield Problem(what, rule, "--fix tp=1, or another divisor of both")
    length = subject.workload.sequence_length
    if plan.cp > 1 and length % (2 * plan.cp):
        yield Problem(
            f"sequence length {length} with cp={plan.cp}",
            "Megatron-LM cuts a sequence into 2 x cp parts",
            f"--seq {length // (2 * plan.cp) * 2 * plan.cp}",
        )
    if plan.chunks > 1 and (plan.pp == 1 or subject.accumulation % plan.pp):
        yield Problem(
            f"chunks={plan.chunks} with pp={plan.pp} and {subject.accumulation} micro-batches",
            "Megatron-LM interleaves on several pipeline ranks, a multiple of pp micro-batches",
            "--fix chunks=1",
        )
    if plan.precision.parameter == "fp64":
        yield Problem("precision=fp64", "Megatron-LM trains in fp32, bf16, fp16 or fp8", "bf16")


# --- arguments -----------------------------------------------------------------------------------


def _batch(account: Account) -> Words:
    subject = account.subject
    account.say("microbatch", "dp")
    yield "--seq-length", str(subject.workload.sequence_length)
    positions = max(subject.model.max_position, subject.workload.sequence_length)
    yield "--max-position-embeddings", str(positions)
    yield "--micro-batch-size", str(subject.plan.microbatch)
    yield "--global-batch-size", str(subject.workload.global_batch)


def _parallel(account: Account) -> Words:
    plan = account.subject.plan
    account.say("tp", "pp", "cp", "ep", "sequence_parallel", "context_method")
    yield "--tensor-model-parallel-size", str(plan.tp)
    yield "--pipeline-model-parallel-size", str(plan.pp)
    if plan.cp > 1:
        yield "--context-parallel-size", str(plan.cp)
        yield "--cp-comm-type", CONTEXT[plan.context_method]
    if plan.ep > 1:
        yield "--expert-model-parallel-size", str(plan.ep)
    if plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel:
        account.refuse("sequence_parallel", "Megatron-LM wants it with TP and EP: switched on")
    if _is_sequence_parallel(plan):
        yield ("--sequence-parallel",)


def _is_sequence_parallel(plan: Plan) -> bool:
    return plan.tp > 1 and (plan.sequence_parallel or plan.ep > 1)


def _pipeline(account: Account) -> Words:
    plan = account.subject.plan
    account.say("layers", "chunks")
    counts = [stage.num_layers for stage in plan.stages]
    if len(set(counts)) > 1:
        yield "--pipeline-model-parallel-layout", layout_text(counts)
    elif plan.chunks > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(plan.chunks)
    native = "1f1b" if plan.chunks == 1 else "interleaved"
    account.say_or_refuse(
        "schedule", plan.schedule == native, f"Megatron-LM runs {native} with chunks={plan.chunks}"
    )


def layout_text(counts: list[int]) -> str:
    """Layers by stage as a pipeline layout: (3, 2, 2) -> `Et*3|t*2|t*2L`."""
    stages = [f"t*{count}" for count in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return "|".join(stages)


def _data(account: Account) -> Words:
    plan = account.subject.plan
    replicas = plan.dp * plan.cp
    if replicas == 1:
        return
    account.say("zero", "hybrid_shard")
    yield ("--overlap-grad-reduce",)
    if plan.zero:
        yield ("--use-distributed-optimizer",)
        yield ("--overlap-param-gather",)
    if plan.zero >= 2:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", SHARDING[plan.zero]
        yield "--ckpt-format", "fsdp_dtensor"
        yield ("--no-gradient-accumulation-fusion",)
        account.say_or_refuse(
            "accumulation", plan.reduces_each, "its FSDP reduces each micro-batch"
        )
        account.refuse("bucket_bytes", "its FSDP has buckets of its own")
        account.refuse("prefetch", "its FSDP decides itself what to gather ahead")
    else:
        account.say("bucket_bytes")
        size = int(plan.bucket_bytes // DTYPE_BYTES[_gradient(plan)])
        yield "--ddp-bucket-size", str(size)
    if plan.zero and plan.hybrid_shard:
        yield "--num-distributed-optimizer-instances", str(replicas // plan.hybrid_shard)


def _recompute(account: Account) -> Words:
    plan = account.subject.plan
    account.say("recompute", "shard_activations")
    if plan.recompute == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", "core_attn"
        if plan.recompute_every > 1:
            account.refuse("recompute_every", "attention is recomputed in every layer instead")
    elif plan.recompute == "full":
        yield "--recompute-granularity", "full"
        if plan.recompute_every > 1:
            most = max(stage.num_layers for stage in plan.stages)
            why = "Megatron-LM recomputes the first layers of each stage instead, as many"
            account.refuse("recompute_every", why)
            yield "--recompute-method", "block"
            yield "--recompute-num-layers", str(-(-most // plan.recompute_every))
        else:
            yield "--recompute-method", "uniform"
            yield "--recompute-num-layers", "1"
    if plan.shard_activations and _is_sequence_parallel(plan):
        account.refuse("shard_activations", "sequence parallelism divides them anyway")
    elif plan.shard_activations:
        yield ("--distribute-saved-activations",)


def _precision(account: Account) -> Words:
    plan = account.subject.plan
    kinds = plan.precision
    account.say("precision.parameter")
    if kinds.parameter != "fp32":
        yield ("--fp16" if kinds.parameter == "fp16" else "--bf16",)
    if kinds.parameter == "fp8":
        yield "--fp8-format", "hybrid"
    stored, gradient = _stored(plan), _gradient(plan)
    for name in ("gradient", "reduction"):
        account.say_or_refuse(
            f"precision.{name}",
            getattr(kinds, name) == gradient,
            f"gradients are kept and reduced in {gradient}",
        )
    if stored != "fp32":
        is_low = gradient != "fp32"
        if not is_low:
            yield ("--accumulate-allreduce-grads-in-fp32",)
        elif stored == "bf16":
            yield ("--grad-reduce-in-bf16",)
    yield from _optimizer(account, stored)


def _stored(plan: Plan) -> str:
    """The dtype of parameters: in fp8 only products are."""
    return "bf16" if plan.precision.parameter == "fp8" else plan.precision.parameter


def _gradient(plan: Plan) -> str:
    """The dtype in which Megatron-LM keeps and reduces gradients: fp32, or the parameters'."""
    return "fp32" if plan.precision.gradient == "fp32" else _stored(plan)


def _optimizer(account: Account, stored: str) -> Words:
    """Dtypes of master weights and moments, and whether they are in host memory."""
    plan, kinds = account.subject.plan, account.subject.plan.precision
    is_aware = plan.zero > 0 and stored != "fp32"
    is_told = is_aware and (kinds.moments != "fp32" or kinds.master == "fp16")
    moments = kinds.moments if is_aware and kinds.moments in MOMENTS else "fp32"
    master = kinds.master if is_aware and kinds.master in ("fp32", "fp16") else "fp32"
    for name, value in (("moments", moments), ("master", master)):
        is_said = getattr(kinds, name) == value
        account.say_or_refuse(f"precision.{name}", is_said, f"{value} instead")
    is_offloaded = plan.offload == "optimizer"
    account.say_or_refuse("offload", is_offloaded, f"{_NO_SETTING} that fits these arguments")
    if is_told or is_offloaded:
        yield ("--use-precision-aware-optimizer",)
    if is_told:
        yield "--main-params-dtype", master
        yield "--exp-avg-dtype", moments
        yield "--exp-avg-sq-dtype", moments
    if is_offloaded:
        yield ("--optimizer-cpu-offload",)
        yield "--optimizer-offload-fraction", "1.0"
    if is_offloaded and not plan.zero:
        account.refuse("zero", "its offloaded optimizer is a sharded one: zero=1")
        yield ("--use-distributed-optimizer",)


def _attention(account: Account) -> Words:
    account.say("attention")
    yield "--attention-backend", ATTENTION[account.subject.plan.attention]
