"""What a row measured: seconds of a step, bytes of the peak."""

from __future__ import annotations

from triptych.model.count import training_flops_per_token
from triptych.model.model import Model
from triptych.plan.workload import Workload
from triptych.units import GIB
from triptych.validate.table import Row

DISAGREES = "check:"
"""Notes mark with this word what contradicts the arithmetic of the other columns."""

TIMED = ("iteration_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_reported")
MEMORY = "peak_mem_gb_per_gpu"


def step_time_s(row: Row, model: Model, workload: Workload, peak_flops: float) -> float | None:
    """Seconds of a step: stated, or from throughput, FLOP/s or MFU; None if nothing is stated."""
    if seconds := row.number("iteration_time_s"):
        return seconds
    devices = row.number("n_gpus") or 1.0
    if rate := row.number("tokens_per_s_per_gpu"):
        return workload.tokens / rate / devices
    if attained := row.number("tflops_per_gpu"):
        return _counted_flops(row, model, workload) / devices / (attained * 1e12)
    if mfu := row.number("mfu_reported"):
        share = mfu / 100.0 if mfu > 1.0 else mfu
        flops = training_flops_per_token(model, workload.sequence_length) * workload.tokens
        return flops / devices / (share * peak_flops)
    return None


def _counted_flops(row: Row, model: Model, workload: Workload) -> float:
    """FLOPs of a step as a row counts them.

    Hardware FLOPs are those of Narayanan et al. 2021, equation 3: 96Bslh^2 (1 + s/6h + V/16lh),
    full recomputation and whole attention; without recomputation three quarters of it.
    """
    if not row.text("tflops_kind").lower().startswith("hardware"):
        return training_flops_per_token(model, workload.sequence_length) * workload.tokens
    h, s, layers = model.hidden, workload.sequence_length, model.num_layers
    per_token = 96.0 * layers * h * h * (1.0 + s / (6.0 * h) + model.vocab / (16.0 * layers * h))
    recomputes = row.text("recompute") != "none"
    return per_token * workload.tokens * (1.0 if recomputes else 0.75)


def peak_bytes(row: Row) -> float | None:
    """Bytes of a rank at its peak; decimal gigabytes where the notes of a row say GB."""
    size = row.number(MEMORY)
    if size is None:
        return None
    return size * (1e9 if _is_decimal(row) else GIB)


ALLOCATED, RESERVED = ("allocated", "alloc gib", "alpa"), ("torchtitan",)
"""Words that say what a peak counts: tensors alone, or what the allocator has reserved."""


def counted_bytes(row: Row, peak: float, allocator: float, context: float) -> float:
    """Of the bytes of a peak, what a row's tool counts: all that the device reports, or less."""
    if row.says(*ALLOCATED):
        return peak - allocator - context
    return peak - context if row.says(*RESERVED) else peak


def _is_decimal(row: Row) -> bool:
    told = row.text("notes").lower()
    return "gb" in told.replace("gib", "") and "gib" not in told and "nvidia-smi" in told
