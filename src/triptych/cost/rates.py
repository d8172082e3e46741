"""What a device attains, for one dtype: the denominators of every time in this package."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cluster.cluster import Cluster, Device
from triptych.units import DTYPE_BYTES

ATTENTION_EFFICIENCY = 0.6
"""Flash attention's rate over that of large products (causal FLOPs; A100 0.58, H100 0.55 of peak
in aiconfigurator's kernel tables, 0.36 in torchtitan's SDPA runs)."""

_STAND_INS = {
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16"),
    "fp32": ("bf16", "fp16"),
    "fp64": ("fp32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Attained rates of a device that computes in `dtype`, and the sheet peak behind them."""

    dtype: str
    peak_flops: float
    gemm_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    operator_s: float
    element_bytes: float
    is_cpu: bool
    stand_in: str = ""  # dtype whose peak was used because the sheet has none


def rates(device: Device, dtype: str) -> Rates:
    """The rates of a device for a dtype; another dtype's peak stands in where the sheet has none.

    fp64 without a peak of its own counts as half of fp32. In fp8 only products are: attention and
    what is kept and moved stay in 16 bit.
    """
    source, peak = _peak(device, dtype)
    attention_peak = _peak(device, "bf16")[1] if dtype == "fp8" else peak
    attained = peak * device.gemm_efficiency
    return Rates(
        dtype=dtype,
        peak_flops=peak,
        gemm_flops=attained,
        attention_flops=attention_peak * device.gemm_efficiency * ATTENTION_EFFICIENCY,
        memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        operator_s=device.operator_s,
        element_bytes=max(2.0, DTYPE_BYTES[dtype]),
        is_cpu=device.kind == "cpu",
        stand_in="" if source == dtype else source,
    )


def _peak(device: Device, dtype: str) -> tuple[str, float]:
    """The dtype whose sheet peak counts, and that peak."""
    source = dtype if dtype in device.peak_flops else _stand_in(device, dtype)
    return source, device.peak_flops[source] * (0.5 if dtype == "fp64" != source else 1.0)


def _stand_in(device: Device, dtype: str) -> str:
    for name in (*_STAND_INS.get(dtype, ()), *device.peak_flops):
        if name in device.peak_flops:
            return name
    raise ValueError(f"device {device.name} has no peak_flops at all")


def slowest_device(cluster: Cluster) -> Device:
    """The device that a uniform plan waits for: the least memory and the lowest rates count."""
    devices = [group.device for group in cluster.groups]
    return min(devices, key=lambda d: (min(d.peak_flops.values()), d.memory_bytes_per_s))


def memory_limit_bytes(cluster: Cluster) -> float:
    """Bytes that every rank of a uniform plan may use."""
    return min(group.device.memory_bytes for group in cluster.groups)
