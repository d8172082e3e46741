"""How much memory a rank has needed at most."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
import torch.distributed as dist


class PeakMemory:
    """Peak bytes of this rank, and of the largest rank as of the last `share`.

    On CUDA what the allocator held; on a CPU what the process grew by since this was made, so that
    the interpreter and its libraries do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0 if device.type == "cuda" else _resident_peak_bytes()
        self._largest_bytes = 0

    def own_bytes(self) -> int:
        """Peak bytes of this rank."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _resident_peak_bytes() - self._start_bytes)

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


def _resident_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
