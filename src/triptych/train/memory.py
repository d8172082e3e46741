"""How much memory a rank has needed at most."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class PeakMemory:
    """Peak bytes of this rank, and of the largest rank as of the last `share`.

    Predictions count the whole process, and so does this: on a CPU what was resident, on CUDA what
    the allocator reserved at most and what else the process holds on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest_bytes = 0

    def own_bytes(self) -> int:
        """Peak bytes of this rank."""
        if self._device.type != "cuda":
            return _resident_peak_bytes()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        other_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
        return int(torch.cuda.max_memory_reserved(self._device) + max(0, other_bytes))

    def share(self) -> None:
        """Learns the largest rank's peak; collective over all ranks."""
        self._largest_bytes = max(gathered(self.own_bytes()))

    def largest_bytes(self) -> int:
        """Peak bytes of the largest rank, as far as this rank knows."""
        return max(self._largest_bytes, self.own_bytes())


def gathered(value: Any) -> list[Any]:
    """The values of all ranks in order of rank; collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def available_bytes(device: torch.device) -> int:
    """Memory that is free for this rank: of its GPU, or of the whole host, which ranks share."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):  # not Linux: what an exec inherited counts too
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
