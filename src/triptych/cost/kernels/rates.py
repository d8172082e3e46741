"""What a device attains, for one dtype: the denominators of every time in this package."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.cluster.cluster import Cluster, Device
from triptych.cluster.measured import Curve, Kernels
from triptych.units import DTYPE_BYTES

_STAND_INS = {
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16"),
    "fp32": ("bf16", "fp16"),
    "fp64": ("fp32",),
}


HOST_BACKWARD = 1.45
"""Host time of the backward over the forward's, where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Attained rates of a device that computes in `dtype`, and the sheet peak behind them.

    `gemm_flops` are of large products that last, `burst_flops` of those that are over before power
    limits the clock; `flash_flops` of attention kernels by generation, in 16 bit at least;
    `read_bytes_per_s` of what is only read.
    """

    dtype: str
    peak_flops: float
    gemm_flops: float
    burst_flops: float
    flash_flops: tuple[float, float, float]
    plain_flops: float  # products that tensor cores cannot do
    ramp_k: float
    multiprocessors: int  # 0: none to fill with tiles
    memory_bytes_per_s: float
    read_bytes_per_s: float
    operator_s: float
    element_bytes: float
    is_cpu: bool
    stand_in: str = ""  # dtype whose peak was used because the sheet has none
    host_backward: float = HOST_BACKWARD
    kernels: Kernels | None = None  # what was measured counts instead of the rates above
    optimizer: Curve | None = None  # the same for updates, by elements

    def slowed(self, rate: float) -> Rates:
        """The same with products at a part of their rate."""
        return replace(self, gemm_flops=self.gemm_flops * rate, burst_flops=self.burst_flops * rate)


FULL_WIDTH_EFFICIENCY = 0.93
"""Attained share of the fp32 and fp64 peaks, which no power limit cuts (V100, 14.6 TFLOP/s)."""

PLAIN_EFFICIENCY = 0.4
"""Attained share of the fp32 peak where operands are not aligned to 16 bytes (A100, 8 TFLOP/s)."""


def rates(device: Device, dtype: str) -> Rates:
    """The rates of a device for a dtype; another dtype's peak stands in where the sheet has none.

    fp64 without a peak of its own counts as half of fp32. In fp8 only products are: attention and
    what is kept and moved stay in 16 bit.
    """
    source, peak = _peak(device, dtype)
    attention_peak = _peak(device, "bf16")[1] if dtype == "fp8" else peak
    first, second, third = (attention_peak * share for share in device.flash_efficiency)
    share = FULL_WIDTH_EFFICIENCY if _is_full_width(device, dtype) else device.gemm_efficiency
    sustained = peak * share
    measured = device.measured
    host_s = measured.host_s if measured else (device.operator_s, device.operator_s * HOST_BACKWARD)
    moved_bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    return Rates(
        dtype=dtype,
        peak_flops=peak,
        gemm_flops=sustained,
        burst_flops=max(sustained, peak * device.gemm_burst),
        flash_flops=(first, second, third),
        plain_flops=PLAIN_EFFICIENCY * device.peak_flops.get("fp32", peak),
        ramp_k=device.gemm_ramp_k,
        multiprocessors=device.multiprocessors,
        memory_bytes_per_s=moved_bytes_per_s,
        read_bytes_per_s=device.read_bytes_per_s or moved_bytes_per_s,
        operator_s=host_s[0],
        element_bytes=max(2.0, DTYPE_BYTES[dtype]),
        is_cpu=device.kind == "cpu",
        stand_in="" if source == dtype else source,
        host_backward=host_s[1] / host_s[0] if host_s[0] else HOST_BACKWARD,
        kernels=measured.kernels.get(dtype) if measured else None,
        optimizer=measured.optimizer if measured else None,
    )


def _is_full_width(device: Device, dtype: str) -> bool:
    return device.kind != "cpu" and dtype in ("fp32", "fp64") and dtype in device.peak_flops


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
    """The device that ranks on all groups wait for: of each rate the lowest.

    One kind may be the slowest at products, another at what memory bounds. Measured devices have
    rates that are not compared one by one: of these the slower one counts.
    """
    devices = [group.device for group in cluster.groups]
    slowest = min(devices, key=lambda d: (min(d.peak_flops.values()), d.memory_bytes_per_s))
    dtypes = set.intersection(*(set(device.peak_flops) for device in devices))
    if not dtypes or any(device.measured for device in devices) or len(set(map(id, devices))) == 1:
        return slowest
    return replace(
        slowest,
        memory_bytes_per_s=min(device.memory_bytes_per_s for device in devices),
        peak_flops={
            dtype: min(device.peak_flops[dtype] for device in devices) for dtype in sorted(dtypes)
        },
    )


def memory_limit_bytes(cluster: Cluster) -> float:
    """Bytes that every rank of a uniform plan may use."""
    return min(group.device.memory_bytes for group in cluster.groups)
