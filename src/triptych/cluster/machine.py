"""What this machine has: usable cores and memory (containers respected), processor, NVIDIA GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device as `nvidia-smi` lists it."""

    index: int
    uuid: str
    name: str
    memory_bytes: float


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: its affinity mask, cut to the quota of its control groups.

    A quota of 1.5 cores gives 1: two busy ranks would be throttled.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS has neither affinity nor control groups
        cores = os.cpu_count() or 1
    return max(1, min(cores, int(_core_quota(root))))


def memory_bytes(root: Path = ROOT) -> float:
    """Memory of the machine, cut to the limit of the process's control groups."""
    limits = [_read_number(file) for file in _group_files(root, "memory.max")]
    limits += [
        _read_number(file)
        for file in _group_files(root, "memory.limit_in_bytes", controller="memory")
    ]
    return min([_physical_memory_bytes(root), *limits])


def cpu_name(root: Path = ROOT) -> str:
    """The processor's name, as /proc/cpuinfo has it."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction-set flags of the processor; empty where they are not listed."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def list_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """CUDA devices that a process would see, `CUDA_VISIBLE_DEVICES` respected; else empty."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(parse_gpus(answer.stdout), environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(listing: str) -> list[Gpu]:
    """The devices of an `nvidia-smi` listing: index, UUID, name, MiB on each line."""
    gpus = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit() and fields[3].isdigit():
            index, uuid, name, memory_mib = fields
            memory = float(memory_mib) * 1024**2
            gpus.append(Gpu(index=int(index), uuid=uuid, name=name, memory_bytes=memory))
    return gpus


def visible(gpus: list[Gpu], selection: str | None) -> list[Gpu]:
    """The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order, up to an unknown one."""
    if selection is None:
        return gpus
    chosen: list[Gpu] = []
    for word in filter(None, (word.strip() for word in selection.split(","))):
        named = (gpu for gpu in gpus if word == str(gpu.index) or gpu.uuid.startswith(word))
        gpu = next(named, None)
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def _core_quota(root: Path) -> float:
    """The tightest CPU quota on the way from the process's control group to the root, in cores."""
    quotas = [float("inf")]
    for file in _group_files(root, "cpu.max"):
        quota, _, period = _read(file).partition(" ")
        if quota.strip().isdigit() and period.strip().isdigit():
            quotas.append(int(quota) / int(period))
    for file in _group_files(root, "cpu.cfs_quota_us", controller="cpu"):
        quota_us = _read_number(file)
        period_us = _read_number(file.with_name("cpu.cfs_period_us"))
        if 0 < quota_us < float("inf") and 0 < period_us < float("inf"):
            quotas.append(quota_us / period_us)
    tightest = min(quotas)
    return tightest if tightest < float("inf") else os.cpu_count() or 1


def _group_files(root: Path, name: str, controller: str = "") -> list[Path]:
    """Files of that name in the process's control group and those above it (version 1 or 2)."""
    base = root / "sys/fs/cgroup" / controller
    files = [base / name]
    for line in _read(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)  # hierarchy, controllers (none in version 2), path
        if len(fields) == 3 and controller in fields[1].split(","):
            relative = Path(fields[2].lstrip("/"))
            files += [base / folder / name for folder in (relative, *relative.parents)]
    return [file for file in dict.fromkeys(files) if file.is_file()]


def _physical_memory_bytes(root: Path) -> float:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return float(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 8.0 * 1024**3


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> float:
    """The number in a file; infinite for `max` and for what cannot be read."""
    try:
        return float(_read(path).strip())
    except ValueError:
        return float("inf")
