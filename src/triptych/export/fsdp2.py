"""A plan as an `accelerate` configuration file with FSDP2 (or DDP where nothing is sharded)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.errors import Problem
from triptych.export.target import Account, Export, Subject, commented

_NO_SETTING = "FSDP2 has no such setting"
_IN_CODE = "the training script says it"
_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def impossible_in_fsdp2(subject: Subject) -> Iterator[Problem]:
    """What FSDP2 under accelerate cannot run at all."""
    plan = subject.plan
    if len(plan.stages) > 1:
        what, rule = f"pp={plan.pp}, chunks={plan.chunks}", "accelerate's FSDP2 has no pipeline"
        yield Problem(what, rule, "--fix pp=1")
    if plan.ep > 1:
        yield Problem(f"ep={plan.ep}", "accelerate's FSDP2 has no expert parallelism", "--fix ep=1")
    if plan.zero == 0 and plan.dp > 1 and plan.tp * plan.cp > 1:
        what = f"zero=0 with dp={plan.dp}, tp={plan.tp}, cp={plan.cp}"
        rule = "accelerate joins data with other axes under FSDP only"
        yield Problem(what, rule, "--fix zero=2")
    if plan.precision.parameter not in _PRECISIONS:
        what = f"precision={plan.precision.parameter}"
        yield Problem(what, "accelerate runs fp32, bf16, fp16 or fp8", "--fix precision=bf16")


def export_fsdp2(subject: Subject) -> Export:
    """The YAML of a legal plan that `impossible_in_fsdp2` has nothing against."""
    account = Account(subject)
    plan = subject.plan
    account.say("dp", "tp", "cp", "pp", "ep", "zero")
    is_ddp = plan.zero == 0 and plan.tp * plan.cp == 1
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": ("MULTI_GPU" if plan.dp > 1 else "NO") if is_ddp else "FSDP",
        "mixed_precision": _PRECISIONS[plan.precision.parameter],
        "num_machines": subject.nodes,
        "num_processes": plan.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
    }
    if not is_ddp:
        document["fsdp_config"] = _fsdp(account)
        document["parallelism_config"] = _parallelism(account)
    if plan.compile:
        account.say("compile")
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    _precision(account, is_ddp)
    _rest(account, is_ddp)
    notes = account.close(_NO_SETTING)
    heading = (
        f"# Plan {plan.short()}\n# of {subject.model.name}: accelerate launch --config_file FILE\n"
    )
    text = heading + commented(notes) + _yaml(document)
    return Export(target="fsdp2", text=text, notes=notes)


def _fsdp(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    if plan.zero < 2:
        account.refuse("zero", "FSDP2 shards gradients too: as ZeRO-2")
    account.say_or_refuse("accumulation", plan.reduces_each, "each micro-batch is reduced")
    account.say("offload") if plan.offload in ("activations", "parameters") else None
    is_full = plan.recompute == "full"
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": plan.offload == "parameters",
        "fsdp_activation_checkpointing": is_full,
        "fsdp_activation_checkpointing_offload": is_full and plan.offload == "activations",
    }


def _parallelism(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    shards = plan.hybrid_shard if plan.zero >= 2 and plan.hybrid_shard else plan.dp
    account.say_or_refuse("hybrid_shard", shards == (plan.hybrid_shard or plan.dp), "ignored")
    section: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": plan.dp // shards,
        "parallelism_config_dp_shard_size": shards,
        "parallelism_config_tp_size": plan.tp,
        "parallelism_config_cp_size": plan.cp,
    }
    if plan.cp > 1:
        section["parallelism_config_cp_backend"] = "torch"
        section["parallelism_config_cp_comm_strategy"] = "alltoall"
        is_ring = plan.context_method == "ring"
        account.say_or_refuse("context_method", is_ring, "ring attention instead")
    return section


def _precision(account: Account, is_ddp: bool) -> None:
    kinds = account.subject.plan.precision
    account.say("precision.parameter")
    reduction = "fp32" if is_ddp or kinds.parameter == "fp8" else kinds.parameter
    for name, theirs in (
        ("gradient", "fp32"),
        ("master", "fp32"),
        ("moments", "fp32"),
        ("reduction", reduction),
    ):
        is_said = getattr(kinds, name) == theirs
        account.say_or_refuse(f"precision.{name}", is_said, f"{theirs} instead")


def _rest(account: Account, is_ddp: bool) -> None:
    plan, workload = account.subject.plan, account.subject.workload
    is_said = plan.recompute == "none" or (plan.recompute == "full" and not is_ddp)
    account.say_or_refuse("recompute", is_said, f"{_IN_CODE}: gradient_checkpointing_enable()")
    account.refuse(
        "microbatch",
        f"{_IN_CODE}: DataLoader(batch_size={plan.microbatch}) and "
        f"gradient_accumulation_steps={account.subject.accumulation}, for {workload.global_batch}"
        " sequences a step",
    )
    account.refuse("sequence_parallel", "the model's own tp plan says it")
    account.refuse("attention", f"{_IN_CODE}: attn_implementation")
    account.refuse(
        "bucket_bytes", "one bucket a layer" if not is_ddp else f"{_IN_CODE}: bucket_cap_mb"
    )
    account.refuse("prefetch", "one layer ahead, unless the code says otherwise")


def _yaml(document: dict[str, Any], indent: str = "") -> str:
    """Nested tables of texts, numbers and booleans as YAML."""
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return f"'{text}'" if text.lower() in ("no", "yes", "on", "off", "true", "false") else text
