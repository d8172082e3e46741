"""The cores of the machine at hand as devices: measured in about a second, one rank a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup

PROBE = Path(__file__).with_name("probe.py")
MAX_PROBES = 4  # at once: enough to show what cores share, few enough to start quickly
PROBE_LIMIT_S = 30.0
FIGURES = (
    "fp32_flops",
    "small_fp32_flops",
    "fp64_flops",
    "copy_bytes_per_s",
    "read_bytes_per_s",
)
"""What a probe says of its core."""

GLOO_SHARE = 0.4
"""What gloo attains of a plain TCP exchange: 1.3-1.7 of 3.5 GB/s (torch 2.13, 2 ranks, 16 MiB)."""

GLOO_HOPS = 8.0
"""A gloo step in plain TCP messages: about 50 us against 6 us (threads hand the work over)."""

MEMORY_EFFICIENCY = 1.0
"""What norms (0.6), rotations (0.7), SwiGLU (1.7) and additions (5) of a layer together attain of a
large copy: they compute as they move, but much of what they read is in a cache still."""

OPERATOR_S = 10e-6


class ProbeError(Exception):
    """The measurement did not come about; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What identifies a machine and bounds its ranks."""

    cpu: str
    flags: frozenset[str]
    cores: int
    memory_bytes: float


def measure(machine: Machine, fingerprint: str) -> Cluster:
    """The machine as one node with a rank on every core.

    Raises ProbeError if the probes cannot run.
    """
    figures = _run_probes(min(machine.cores, MAX_PROBES))
    version = figures[0]["numpy"]
    when = time.strftime("%Y-%m-%d")
    mean = {key: sum(float(one[key]) for one in figures) / len(figures) for key in FIGURES}
    source = f"measured {when} with numpy {version}, {len(figures)} processes at once"
    group = NodeGroup(
        nodes=1,
        devices_per_node=machine.cores,
        device=_device(machine, mean, source),
        link=_link(figures[0], when),
    )
    notes = (
        f"date: {when}",
        f"cpu: {machine.cpu}",
        f"cores: {machine.cores}",
        f"numpy: {version}",
        f"fingerprint: {fingerprint}",
    )
    return Cluster(name="local", groups=(group,), network=group.link, notes=notes)


def for_ranks(cluster: Cluster, machine: Machine, ranks: int | None) -> Cluster:
    """The machine with `ranks` ranks (None: one a core): they share memory, and cores if too few.

    A rank has one core at most; with fewer cores than ranks, rates shrink and times grow alike.
    """
    ranks = machine.cores if ranks is None else ranks
    share = min(1.0, machine.cores / ranks)
    group = cluster.groups[0]
    device = replace(
        group.device,
        memory_bytes=machine.memory_bytes / ranks,
        memory_bytes_per_s=group.device.memory_bytes_per_s * share,
        read_bytes_per_s=group.device.read_bytes_per_s * share,
        peak_flops={dtype: flops * share for dtype, flops in group.device.peak_flops.items()},
        operator_s=group.device.operator_s / share,
    )
    link = replace(
        group.link,
        latency_s=group.link.latency_s / share,
        bytes_per_s=group.link.bytes_per_s * share,
    )
    shared = f"{ranks} ranks share {machine.cores} cores"
    return replace(
        cluster,
        name="local" if ranks == machine.cores else f"{ranks}xlocal",
        groups=(replace(group, devices_per_node=ranks, device=device, link=link),),
        network=link,
        notes=(*cluster.notes, shared) if share < 1 else cluster.notes,
    )


def _run_probes(count: int) -> list[Mapping[str, float]]:
    """Runs probes side by side, one thread each; the first also measures the link."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environ = {**os.environ, **dict.fromkeys(threads, "1")}
    command = [sys.executable, str(PROBE)]
    try:
        probes = [
            subprocess.Popen(
                [*command, "--link"] if index == 0 else command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]
    except OSError as error:
        raise ProbeError(str(error)) from error
    try:
        return [_figures(probe) for probe in probes]
    finally:
        for probe in probes:
            probe.kill()
            probe.communicate()


def _figures(probe: subprocess.Popen[str]) -> dict[str, float]:
    try:
        output, complaint = probe.communicate(timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer in {PROBE_LIMIT_S:.0f} s") from error
    if probe.returncode != 0:
        lines = complaint.strip().splitlines()
        raise ProbeError(lines[-1] if lines else f"exit code {probe.returncode}")
    figures: dict[str, float] = json.loads(output)
    return figures


def _device(machine: Machine, mean: Mapping[str, float], source: str) -> Device:
    fp32 = mean["fp32_flops"]
    share, basis = _bf16_share(machine.flags)
    return Device(
        name="local-cpu",
        kind="cpu",
        memory_bytes=machine.memory_bytes / machine.cores,
        memory_bytes_per_s=mean["copy_bytes_per_s"],
        peak_flops={"fp64": mean["fp64_flops"], "fp32": fp32, "bf16": fp32 * share},
        gemm_efficiency=max(0.3, min(1.0, mean["small_fp32_flops"] / fp32)),
        memory_efficiency=MEMORY_EFFICIENCY,
        read_bytes_per_s=mean["read_bytes_per_s"],
        operator_s=OPERATOR_S,
        source=f"{source}; bf16 {share:g} x fp32 ({basis}, not measured)",
    )


def _bf16_share(flags: frozenset[str]) -> tuple[float, str]:
    """bf16 products by fp32 ones, from the instruction set: numpy cannot measure them."""
    if "amx_bf16" in flags:
        return 6.0, "AMX"
    if "avx512_bf16" in flags:
        return 1.5, "AVX512-BF16"
    return 0.25, "no bf16 units"


def _link(figures: Mapping[str, float], when: str) -> Link:
    return Link(
        name="loopback",
        latency_s=figures["latency_s"] * GLOO_HOPS,
        bytes_per_s=figures["duplex_bytes_per_s"] * GLOO_SHARE,
        efficiency=1.0,
        source=f"measured {when}: TCP both ways between two processes, of which gloo attains "
        f"{GLOO_SHARE:g}, a step {GLOO_HOPS:g} messages",
    )
