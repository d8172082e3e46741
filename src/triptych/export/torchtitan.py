"""A plan as a torchtitan job: the TOML of `JobConfig` (0.2), and arguments for 0.3 in a comment.

Release 0.3 takes no TOML: a Python function stands for the job, and arguments change its fields.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from triptych.errors import Problem
from triptych.export.target import Account, Export, Subject, commented
from triptych.model.model import Experts
from triptych.plan.plan import Plan

_NO_SETTING = "torchtitan has no such setting"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
# family, layers, hidden size -> name and flavor in torchtitan's registry
FLAVORS = {
    ("llama", 32, 4096): ("llama3", "8B"),
    ("llama", 80, 8192): ("llama3", "70B"),
    ("llama", 126, 16384): ("llama3", "405B"),
    ("qwen3", 28, 1024): ("qwen3", "0.6B"),
    ("qwen3", 28, 2048): ("qwen3", "1.7B"),
    ("qwen3", 36, 2560): ("qwen3", "4B"),
    ("qwen3", 36, 4096): ("qwen3", "8B"),
    ("qwen3", 40, 5120): ("qwen3", "14B"),
    ("qwen3", 64, 5120): ("qwen3", "32B"),
    ("qwen3_moe", 48, 2048): ("qwen3", "30B-A3B"),
    ("qwen3_moe", 94, 4096): ("qwen3", "235B-A22B"),
    ("deepseek_v3", 61, 7168): ("deepseek_v3", "671B"),
}
_VOCABULARIES = {"llama3": 128256}


def impossible_in_torchtitan(subject: Subject) -> Iterator[Problem]:
    """What torchtitan cannot run at all."""
    plan = subject.plan
    if plan.precision.parameter not in ("fp32", "bf16", "fp8"):
        what = f"precision={plan.precision.parameter}"
        yield Problem(what, "torchtitan trains in fp32, bf16 or fp8", "--fix precision=bf16")
    heads = subject.model.kv_heads
    if heads % plan.tp:
        rule = "torchtitan divides KV heads evenly"
        yield Problem(f"tp={plan.tp} for {heads} KV heads", rule, f"a divisor of {heads}")
    if plan.zero == 0 and plan.dp > 1 and plan.tp * plan.cp > 1:
        what = f"zero=0 with dp={plan.dp}, tp={plan.tp}, cp={plan.cp}"
        rule = "torchtitan joins replicas with tensor or context parallelism under FSDP only"
        yield Problem(what, rule, "--fix zero=2")


def export_torchtitan(subject: Subject) -> Export:
    """The TOML of a legal, uniform plan that `impossible_in_torchtitan` has nothing against."""
    account = Account(subject)
    document = {
        "model": _model(account),
        "training": _training(account),
        "parallelism": _parallelism(account) | _pipeline(account),
        "activation_checkpoint": _recompute(account),
        "compile": {"enable": subject.plan.compile},
    }
    account.say("compile")
    account.refuse("bucket_bytes", "FSDP2 has one bucket a layer")
    account.refuse("prefetch", "FSDP2 gathers one layer ahead")
    account.refuse("attention", "the model's flavor says it")
    notes = account.close(_NO_SETTING)
    heading = f"# Plan {subject.plan.short()}\n# of {subject.model.name}\n"
    arguments = _as_arguments(document, subject.plan)
    start = "# torchtitan 0.2: torchrun ... -m torchtitan.train --job.config_file FILE\n"
    return Export(
        target="torchtitan",
        text=f"{heading}{start}{arguments}{commented(notes)}\n{_toml(document)}",
        notes=notes,
    )


def _model(account: Account) -> dict[str, Any]:
    model = account.subject.model
    name, flavor = FLAVORS.get((model.family, model.num_layers, model.hidden), ("", ""))
    if not name or _VOCABULARIES.get(name, model.vocab) != model.vocab:
        account.remark("model.flavor", model.name, "not in torchtitan's registry: fill it in")
        return {"name": model.family, "flavor": model.name}
    return {"name": name, "flavor": flavor}


def _training(account: Account) -> dict[str, Any]:
    subject, plan = account.subject, account.subject.plan
    kinds = plan.precision
    account.say("dp", "microbatch", "precision.parameter")
    is_bare = kinds.parameter == "bf16" and kinds.master == "bf16"  # no fp32 copy at all
    stored = "bf16" if is_bare else "fp32"
    for name, theirs in (
        ("gradient", stored),
        ("master", stored),
        ("moments", stored),
        ("reduction", "fp32"),
    ):
        account.say_or_refuse(
            f"precision.{name}", getattr(kinds, name) == theirs, f"{theirs} instead"
        )
    if kinds.parameter == "fp8":
        account.refuse("precision.parameter", "bf16; add [quantize.linear.float8]")
    is_moved = plan.offload == "parameters"
    account.say_or_refuse("offload", is_moved, "it moves parameters and all else, or nothing")
    return {
        "seq_len": subject.workload.sequence_length,
        "local_batch_size": plan.microbatch * (subject.accumulation if plan.pp > 1 else 1),
        "global_batch_size": subject.workload.global_batch,
        "dtype": _DTYPES[stored],
        "mixed_precision_param": _DTYPES.get(kinds.parameter, "bfloat16"),
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": is_moved,
    }


def _parallelism(account: Account) -> dict[str, Any]:
    plan, model = account.subject.plan, account.subject.model
    account.say("tp", "cp", "ep", "zero", "hybrid_shard")
    shards = (plan.hybrid_shard or plan.dp) if plan.zero else 1
    section: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
    }
    if plan.zero == 1 or (plan.zero == 0 and plan.cp > 1):
        account.refuse("zero", "FSDP2 shards gradients too: as ZeRO-2")
    is_each = plan.pp == 1 and plan.reduces_each
    account.say_or_refuse("accumulation", is_each, "reduced each micro-batch, last with a pipeline")
    if plan.cp > 1:
        section["context_parallel_rotate_method"] = "alltoall"
        is_ring = plan.context_method == "ring"
        account.say_or_refuse("context_method", is_ring, "ring attention instead")
    account.say_or_refuse("sequence_parallel", plan.sequence_parallel, "it comes with TP")
    if isinstance(model.blocks[-1].mlp, Experts):
        section["expert_parallel_degree"] = plan.ep
        section["expert_tensor_parallel_degree"] = plan.tp if plan.ep > 1 else 1
    return section


def _pipeline(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    account.say("pp", "chunks", "layers")
    if len(plan.stages) == 1:
        return {"pipeline_parallel_degree": 1}
    native = "1f1b" if plan.chunks == 1 else "interleaved"
    schedule = SCHEDULES.get(plan.schedule, SCHEDULES[native])
    account.say_or_refuse("schedule", plan.schedule in SCHEDULES, f"{schedule} instead")
    return {
        "pipeline_parallel_degree": plan.pp,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": plan.microbatch,
        "module_fqns_per_model_part": _modules(plan),
    }


def _modules(plan: Plan) -> list[list[str]]:
    """The modules of each stage, so that torchtitan does not divide the layers its own way."""
    parts = [[f"layers.{index}" for index in range(s.start, s.stop)] for s in plan.stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    account.say("recompute", "recompute_every")
    if plan.recompute == "selective":
        account.refuse("recompute", "by operator: torchtitan keeps products and attention")
        if plan.recompute_every > 1:
            account.refuse("recompute_every", "in every layer instead")
        return {"mode": "selective", "selective_ac_option": "op"}
    if plan.recompute == "full" and plan.recompute_every > 1:
        return {"mode": "selective", "selective_ac_option": str(plan.recompute_every)}
    return {"mode": plan.recompute}


_GONE = ("context_parallel_rotate_method", "expert_tensor_parallel_degree")
FUNCTIONS = frozenset(
    f"{module}_{size}"
    for module, sizes in {
        "llama3": ("8b", "70b", "405b"),
        "qwen3": ("0_6b", "1_7b", "14b", "32b", "30b_a3b"),
        "deepseek_v3": ("16b", "671b"),
    }.items()
    for size in sizes
)
"""Jobs in the registries of torchtitan 0.3."""


def _as_arguments(document: Mapping[str, Mapping[str, Any]], plan: Plan) -> str:
    """The same for torchtitan 0.3, as a comment."""
    model = document["model"]
    function = "_".join(model.values()).lower().replace("-", "_").replace(".", "_")
    words = ["--module", model["name"], "--config", function]
    for section in ("training", "parallelism", "compile"):
        for key, value in document[section].items():
            if key not in _GONE:
                words += _argument(section, key, value)
    if plan.tp > 1:
        words += _argument("parallelism", "enable_sequence_parallel", plan.sequence_parallel)
    if plan.pp > 1:
        words.append("--training.disable-cuda-graphs")  # it asks for that with a pipeline
    missing = f"#   {function} is in no registry: write that function first\n"
    return (
        "# torchtitan 0.3, whose function behind --config says what is recomputed:\n"
        f"#   torchrun ... -m torchtitan.train {shlex.join(words)}\n"
        f"{'' if function in FUNCTIONS else missing}"
    )


def _argument(section: str, key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{section}.{'' if value else 'no-'}{key.replace('_', '-')}"]
    if isinstance(value, list):  # of modules, where 0.3 has another name for the head
        parts = [["lm_head" if name == "output" else name for name in part] for part in value]
        return [f"--{section}.{key}", *(",".join(part) for part in parts)]
    return [f"--{section}.{key}", str(value)]


def _toml(document: Mapping[str, Mapping[str, Any]]) -> str:
    sections = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])
        for name, table in document.items()
    ]
    return "\n\n".join(sections) + "\n"
