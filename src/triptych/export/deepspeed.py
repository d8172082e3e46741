"""A plan as a DeepSpeed configuration, and a DeepSpeed configuration as a plan.

Keys are those of `deepspeed/runtime/config.py`. Sizes of buckets there are in elements. What the
model's code says (pipeline stages, which layers are recomputed) is not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from triptych.errors import Problem
from triptych.export.imported import Asked, Draft, Imported
from triptych.export.target import Account, Export, Subject
from triptych.plan.workload import Workload
from triptych.units import DTYPE_BYTES

_NO_SETTING = "DeepSpeed has no such setting"

_NO_BEARING = {
    "optimizer", "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown",
    "tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "checkpoint", "dump_state",
    "zero_allow_untested_optimizer", "comms_logger", "prescale_gradients", "memory_breakdown",
    "gradient_predivide_factor", "data_efficiency", "nebula", "aio", "seed",
    "zero_force_ds_cpu_optimizer", "disable_allgather", "monitor_config",
}  # fmt: skip
_ZERO_NO_BEARING = {
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
    "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "elastic_checkpoint",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters", "load_from_fp32_weights", "cpu_offload_use_pin_memory",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "log_trace_cache_warnings",
}  # fmt: skip


def impossible_in_deepspeed(subject: Subject) -> Iterator[Problem]:
    """What DeepSpeed would refuse to start with."""
    plan = subject.plan
    if plan.pp > 1 and plan.zero > 1:
        rule = "DeepSpeed's pipeline engine keeps gradients whole: ZeRO-0 or 1"
        yield Problem(f"zero={plan.zero} with pp={plan.pp}", rule, "--fix zero=1, or --fix pp=1")
    if plan.chunks > 1:
        rule = "DeepSpeed's pipeline ranks run one stage each"
        yield Problem(f"chunks={plan.chunks}", rule, "--fix chunks=1")
    if plan.precision.parameter in ("fp64", "fp8"):
        what, rule = f"precision={plan.precision.parameter}", "DeepSpeed trains in fp32, bf16, fp16"
        yield Problem(what, rule, "--fix precision=bf16")


def export_deepspeed(subject: Subject) -> Export:
    """The JSON of a legal, uniform plan that `impossible_in_deepspeed` has nothing against."""
    account = Account(subject)
    plan = subject.plan
    account.say("dp", "microbatch", "tp", "zero")
    document: dict[str, Any] = {
        "train_batch_size": subject.workload.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch,
        "gradient_accumulation_steps": subject.accumulation,
        "zero_optimization": _zero(account),
        **_precision(account),
        **_axes(account),
        **_activations(account),
    }
    _pipeline(account)
    account.refuse("attention", "the model's code says it")
    account.refuse("compile", "engine.compile() in the code")
    notes = account.close(_NO_SETTING)
    return Export(target="deepspeed", text=json.dumps(document, indent=2) + "\n", notes=notes)


def _zero(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    elements = int(plan.bucket_bytes // DTYPE_BYTES[plan.precision.reduction])
    account.say("bucket_bytes")
    account.say_or_refuse("accumulation", plan.reduces_each, "each micro-batch is reduced")
    account.refuse("prefetch", "stage3_prefetch_bucket_size counts parameters, not layers")
    section: dict[str, Any] = {
        "stage": plan.zero,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
    }
    is_whole = not plan.hybrid_shard
    account.say_or_refuse("hybrid_shard", is_whole, "over all data ranks: DeepSpeed dropped MiCS")
    if plan.offload == "optimizer":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif plan.offload == "parameters":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    account.say("offload")
    return section


def _precision(account: Account) -> dict[str, Any]:
    kinds = account.subject.plan.precision
    account.say("precision.parameter", "precision.gradient", "precision.reduction")
    for name in ("master", "moments"):
        is_said = getattr(kinds, name) == "fp32"
        account.say_or_refuse(f"precision.{name}", is_said, "fp32 instead")
    section: dict[str, Any] = {"communication_data_type": kinds.reduction}
    if kinds.parameter != "fp32":
        section[kinds.parameter] = {"enabled": True}
    return section | {"data_types": {"grad_accum_dtype": kinds.gradient}}


def _axes(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    sections: dict[str, Any] = {}
    if plan.tp > 1:
        sections["tensor_parallel"] = {"autotp_size": plan.tp}
        is_said = not plan.sequence_parallel
        account.say_or_refuse("sequence_parallel", is_said, "AutoTP keeps sequences whole")
    if plan.cp > 1:
        sections["sequence_parallel_size"] = plan.cp
        is_said = plan.context_method == "ulysses"
        account.say_or_refuse("context_method", is_said, "its sequence parallelism is Ulysses")
    if plan.ep > 1:
        sections["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
    account.say("cp", "ep")
    return sections


def _activations(account: Account) -> dict[str, Any]:
    plan = account.subject.plan
    account.say("shard_activations")
    account.say_or_refuse("recompute", plan.recompute == "none", "the model's code says it")
    if plan.recompute == "none":
        return {}
    section = {
        "partition_activations": plan.shard_activations,
        "cpu_checkpointing": plan.offload == "activations",
    }
    return {"activation_checkpointing": section}


def _pipeline(account: Account) -> None:
    plan = account.subject.plan
    code = f"PipelineModule(num_stages={plan.pp}) in the model's code"
    account.say_or_refuse("pp", plan.pp == 1, code)
    account.refuse("layers", "PipelineModule(partition_method=...) in the model's code")
    is_native = plan.schedule == "1f1b"
    account.say_or_refuse("schedule", is_native, "DeepSpeed's pipeline engine runs 1f1b")


# --- reading -------------------------------------------------------------------------------------


def read_deepspeed(
    document: Mapping[str, Any], asked: Asked, usual_sequence: int
) -> tuple[Imported, list[Problem]]:
    """The plan in a configuration, and everything in it that contradicts itself."""
    draft = Draft(asked)
    rest = [*_read_sections(document, draft)]
    draft.pin()
    _settle_dtypes(draft)
    draft.assume_world("DeepSpeed")
    _read_batch(document, draft)
    _read_degrees(draft)
    draft.divide_world("TP x PP x sequence parallel")
    draft.settle_batch()
    length = draft.settle_sequence(usual_sequence)
    if "recompute" not in draft.settings:
        draft.assumed.append("no recomputation: --fix recompute=full if the code has it")
    imported = Imported(
        engine="DeepSpeed",
        plan=draft.plan(),
        workload=Workload(sequence_length=length, global_batch=draft.global_batch or 1),
        not_understood=tuple(rest),
        assumed=tuple(draft.assumed),
    )
    return imported, draft.problems


def _read_sections(document: Mapping[str, Any], draft: Draft) -> Iterator[str]:
    """Reads all sections but the batch; yields keys that are not understood."""
    for key, value in document.items():
        if key == "zero_optimization" and isinstance(value, Mapping):
            yield from _read_zero(value, draft)
        elif key in _SECTIONS:
            _SECTIONS[key](key, value, draft)
        elif key not in _BATCH and key not in _NO_BEARING:
            yield f"{key} = {json.dumps(value)}"


def _read_dtype(key: str, section: Any, draft: Draft) -> None:
    word = "fp16" if key == "fp16" else "bf16"
    if not (isinstance(section, Mapping) and section.get("enabled") is True):
        return
    if draft.dtypes.setdefault("parameter", word) != word:
        rule = "a run has one dtype of parameters"
        draft.problems.append(Problem("both bf16 and fp16 enabled", rule, "one of them"))


def _read_degree(key: str, section: Any, draft: Draft) -> None:
    name, axis = _DEGREES[key]
    value = section.get(name, 1) if name and isinstance(section, Mapping) else section
    size = _count(value, ".".join(filter(None, (key, name))), draft)
    if size and size > 1:
        draft.settings[axis] = size
    if axis == "cp":
        draft.settings["context_method"] = "ulysses"


def _read_gradient(key: str, section: Any, draft: Draft) -> None:
    kind = section.get("grad_accum_dtype") if isinstance(section, Mapping) else None
    draft.dtypes["gradient"] = str(kind or "fp32").lower()


def _read_reduction(key: str, value: Any, draft: Draft) -> None:
    if value:
        draft.dtypes["reduction"] = str(value).lower()


def _read_activations(key: str, section: Any, draft: Draft) -> None:
    section = section if isinstance(section, Mapping) else {}
    shards, offloads = section.get("partition_activations"), section.get("cpu_checkpointing")
    pinned = draft.asked.pins.get("recompute")
    if not (shards or offloads or pinned == "full"):
        return
    draft.settings["recompute"] = "full"
    draft.settings["shard_activations"] = bool(shards)
    if offloads:
        draft.settings.setdefault("offload", "activations")
    if pinned != "full":
        draft.assumed.append("every layer recomputed: activation_checkpointing divides or moves it")


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_DEGREES = {
    "tensor_parallel": ("autotp_size", "tp"),
    "expert_parallel": ("autoep_size", "ep"),
    "sequence_parallel_size": ("", "cp"),
}
_SECTIONS: dict[str, Callable[[str, Any, Draft], None]] = {
    "bf16": _read_dtype,
    "bfloat16": _read_dtype,
    "fp16": _read_dtype,
    **dict.fromkeys(_DEGREES, _read_degree),
    "data_types": _read_gradient,
    "communication_data_type": _read_reduction,
    "activation_checkpointing": _read_activations,
}


def _settle_dtypes(draft: Draft) -> None:
    """DeepSpeed's defaults: fp32 without a section, gradients reduced in the parameters' dtype."""
    parameter = draft.dtypes.setdefault("parameter", "fp32")
    draft.dtypes.setdefault("gradient", "fp32")
    reduction = draft.dtypes.setdefault("reduction", parameter)
    elements = draft.bucket_elements or 500_000_000  # its default
    draft.settings["bucket_bytes"] = int(elements * DTYPE_BYTES.get(reduction, 4))


def _read_zero(section: Mapping[str, Any], draft: Draft) -> Iterator[str]:
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        draft.problems.append(Problem(f"zero_optimization.stage = {stage}", "0, 1, 2 or 3"))
        stage = 0
    draft.settings["zero"] = int(stage)
    size = section.get("reduce_bucket_size", "auto")
    draft.bucket_elements = _count(size, "reduce_bucket_size", draft)
    for key, value in section.items():
        if key in ("offload_optimizer", "offload_param"):
            _read_offload(key, value, draft)
        elif key == "mics_shard_size" and isinstance(value, int) and value > 0:
            draft.settings["hybrid_shard"] = value  # before DeepSpeed 0.19
        elif key == "zero_hpz_partition_size" and value == 1:
            continue
        elif key not in ("stage", "reduce_bucket_size", *_ZERO_NO_BEARING):
            yield f"zero_optimization.{key} = {json.dumps(value)}"


def _read_offload(key: str, section: object, draft: Draft) -> None:
    device = section.get("device", "none") if isinstance(section, Mapping) else "none"
    if device == "none":
        return
    if device == "nvme":
        draft.assumed.append(f"{key} in host memory, not on NVMe")
    ours = "parameters" if key == "offload_param" else "optimizer"
    if draft.settings.get("offload") not in (None, ours):
        draft.assumed.append("parameters and optimizer offloaded: priced as parameters")
        ours = "parameters"
    draft.settings["offload"] = ours


def _read_batch(document: Mapping[str, Any], draft: Draft) -> None:
    """The batch equation: two of three sizes give the third, all three give dp."""
    batch, micro, steps = (_count(document.get(name), name, draft) for name in _BATCH)
    draft.global_batch = batch
    if micro is None and "microbatch" not in draft.settings:
        draft.settings["microbatch"] = 1
        draft.assumed.append("one sequence a micro-batch: --fix microbatch=... if it is another")
    if micro is not None:
        draft.settings["microbatch"] = micro
    if batch and micro and steps:
        dp, rest = divmod(batch, micro * steps)
        if rest or not dp:
            what = f"train_batch_size {batch}, micro-batch {micro}, {steps} accumulation steps"
            rule = "train_batch_size = micro-batch x accumulation steps x data ranks"
            draft.problems.append(Problem(what, rule, f"a multiple of {micro * steps}"))
        else:
            draft.settings["dp"] = dp
    elif micro and steps and not batch:
        draft.accumulation = steps


def _read_degrees(draft: Draft) -> None:
    """Ranks that neither data nor the other axes use are a pipeline's."""
    world, dp = draft.world or 1, draft.settings.get("dp")
    used = draft.degree("tp") * draft.degree("pp") * draft.degree("cp")
    if dp and "pp" not in draft.settings and world % (dp * used) == 0 and world > dp * used:
        left = world // (dp * used)
        if "tp" in draft.settings:
            draft.settings["pp"] = left
            draft.assumed.append(f"pp={left}: {world} ranks, of which {dp * used} are dp x tp x cp")
        else:
            rule = f"dp={dp} leaves {left} of {world} ranks to tensor or pipeline parallelism"
            draft.problems.append(
                Problem(f"{left} ranks without a part", rule, f"--fix tp={left} or --fix pp={left}")
            )
            draft.settings["dp"] = dp * left
    if draft.accumulation:
        ranks = max(1, world // used)
        draft.global_batch = draft.degree("microbatch") * draft.accumulation * ranks


def _count(value: object, name: str, draft: Draft) -> int | None:
    """A whole number from 1; None for what is absent or `auto`."""
    if value is None or value == "auto":
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and value > 0:
        return value
    draft.problems.append(Problem(f"{name} = {value!r}", "it is a whole number from 1", "1"))
    return None
