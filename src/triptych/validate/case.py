"""A row as a case to price: model, cluster, workload, plan, program, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.rates import rates
from triptych.cost.software import Software
from triptych.model.count import training_flops_per_token
from triptych.model.model import Model
from triptych.plan.plan import Plan, even_split
from triptych.plan.workload import Workload
from triptych.validate.architecture import model_of, without_dropout
from triptych.validate.machine import cluster_of
from triptych.validate.measured import DISAGREES, peak_bytes, step_time_s
from triptych.validate.program import precision_of, software_of
from triptych.validate.table import Row, Skip

OUT_OF_MEMORY = "oom"
"""What the ids of rows begin with whose configuration did not fit."""

ASSUMED = ("recompute", "micro_batch_size")
"""Columns whose blank cells are filled with an assumption that changes a step much."""

_RECOMPUTE = ("none", "full", "selective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row, ready to be priced. `rounds` are micro-batches a step, a ragged last one in part."""

    row: Row
    model: Model
    cluster: Cluster
    workload: Workload
    plan: Plan
    software: Software
    rounds: float
    measured_s: float | None
    measured_bytes: float | None

    @property
    def assumed(self) -> tuple[str, ...]:
        """Columns that change a step much and that the row leaves blank."""
        return tuple(name for name in ASSUMED if not self.row.text(name))

    @property
    def ran_out(self) -> bool:
        """True if the configuration was reported not to fit."""
        return self.row.source == OUT_OF_MEMORY

    @property
    def group(self) -> tuple[str, ...]:
        """Cases that differ in their plan alone."""
        columns = ("model_name", "gpu", "n_gpus", "global_batch_size", "seq_len")
        return (self.row.source, *(self.row.text(column) for column in columns))


def case_of(row: Row) -> Case:
    """The case of a row. Raises Skip with the reason if it cannot be priced or compared."""
    model, cluster = model_of(row), cluster_of(row)
    sequence = row.count("seq_len")
    if not sequence:
        raise Skip("sequence length not stated")
    software = software_of(row)
    plan = plan_of(row, model, software)
    if not software.drops or (software.attention != "eager" and plan.attention != "eager"):
        model = without_dropout(model)
    if plan.world_size != row.count("n_gpus"):
        raise Skip("degrees and number of GPUs disagree")
    batch = row.count("global_batch_size")
    workload = Workload(sequence_length=sequence, global_batch=batch or plan.round_rows)
    peak = rates(cluster.device, plan.precision.parameter).peak_flops
    disagree = DISAGREES in row.text("notes").lower()
    seconds = step_time_s(row, model, workload, peak) if batch and not disagree else None
    memory = peak_bytes(row)
    if seconds is None and memory is None and row.source != OUT_OF_MEMORY:
        missing = "nothing measured" if batch else "global batch not stated"
        raise Skip("reported figures disagree" if disagree else missing)
    return Case(
        row=row,
        model=model,
        cluster=cluster,
        workload=workload,
        plan=plan,
        software=software,
        rounds=max(1.0, workload.global_batch / plan.round_rows),
        measured_s=seconds,
        measured_bytes=memory,
    )


def plan_of(row: Row, model: Model, software: Software) -> Plan:
    """The plan of a row.

    Blank cells: one way, nothing sharded, what the program does by itself; a pipeline takes one
    sequence at a time.
    """
    degrees = {name: row.count(name) for name in ("dp", "tp", "pp")}
    zero = row.count("zero_stage")
    if zero is None and row.says("weight-update sharding", "distributed optimizer"):
        zero = 1
    microbatch = row.count("micro_batch_size") or int((row.count("pp") or 1) > 1)
    if None in degrees.values() or not microbatch:
        raise Skip("plan incomplete")
    pp, chunks = row.count("pp") or 1, row.count("vpp_chunks") or 1
    if pp * chunks > model.num_layers:
        raise Skip("fewer layers than stages")
    recompute = row.text("recompute").lower() or _told_recompute(row, model, software)
    if recompute not in _RECOMPUTE:
        raise Skip("recomputation not known")
    if row.says("act_cpu_offload=true", "checkpointed in cpu"):
        raise Skip("offloading is not priced")
    return Plan.uniform(
        model.num_layers,
        dp=degrees["dp"] or 1,
        tp=degrees["tp"] or 1,
        pp=pp,
        cp=row.count("cp") or 1,
        ep=row.count("ep") or 1,
        chunks=chunks if pp > 1 else 1,
        layers=_layers(row, model.num_layers, pp, chunks),
        zero=software.zero if zero is None else zero,
        schedule="interleaved" if chunks > 1 and pp > 1 else "1f1b",
        microbatch=microbatch,
        recompute=recompute,
        sequence_parallel=row.text("sequence_parallel") == "1",
        context_method=software.context_method,
        precision=precision_of(row),
        attention=_attention(row, software),
        compile=software.is_fused or row.text("compile") == "1",
    )


def _attention(row: Row, software: Software) -> str:
    kernel = row.text("attention_kernel").lower()
    if kernel in ("none", "eager", "unfused"):
        return "eager"
    return "flash" if kernel else software.attention


def _told_recompute(row: Row, model: Model, software: Software) -> str:
    """What a blank cell means: full if step time and hardware FLOP/s together count a forward
    more than the model has, otherwise the program's default.
    """
    seconds, attained = row.number("iteration_time_s"), row.number("tflops_per_gpu")
    tokens = (row.number("global_batch_size") or 0) * (row.number("seq_len") or 0)
    is_hardware = row.text("tflops_kind").startswith("hardware")
    if not (seconds and attained and tokens and is_hardware):
        return software.recompute
    flops = attained * 1e12 * (row.number("n_gpus") or 0) * seconds / tokens
    model_flops = training_flops_per_token(model, row.count("seq_len") or 1, causal=False)
    return "full" if flops / model_flops > MORE_THAN_MODEL else "none"


MORE_THAN_MODEL = 1.17
"""FLOPs counted over those of the model that speak for a repeated forward (which makes 1.33)."""


def _layers(row: Row, layers: int, pp: int, chunks: int) -> tuple[int, ...] | None:
    """Layers by stage where embedding and head count as layers; None: split evenly."""
    if pp == 1 or chunks > 1 or not row.says("transformer|embedding"):
        return None
    counts = list(even_split(layers + 2, pp))
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)
