"""Settings of the process that a long run wants: chosen before anything is allocated, and told."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

COLLECT_EVERY = 50
"""Steps between garbage collections, on all ranks at the same step: at other times none waits."""

_ALLOCATOR = "expandable_segments:True"  # far less fragmentation where shapes vary
_RECORDS = 2000


def choose_environment(
    timeout_s: float, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables for CUDA and NCCL that the user has not set; for `os.environ` before CUDA starts.

    A collective that times out ends its rank, and the last ones of each are written beside it.
    """
    chosen = {
        "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": str(_RECORDS),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(timeout_s)),
    }
    return {name: environment.get(name, value) for name, value in chosen.items()}


def near_cores(device: torch.device) -> set[int]:
    """The cores beside a GPU that this process may use; all that it may use without one."""
    allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
    if device.type != "cuda":
        return allowed
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text()
    except OSError:
        return allowed
    return allowed & parse_cores(text) or allowed


def parse_cores(text: str) -> set[int]:
    """The cores of a list as Linux writes it: `0-3,8` -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


class Collector:
    """Python's garbage collector, run at chosen steps only."""

    def __enter__(self) -> Collector:
        gc.collect()
        gc.freeze()  # what is there now lives as long as the run
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        gc.unfreeze()

    def between(self, step: int) -> None:
        """Collects if it is time to."""
        if step % COLLECT_EVERY == 0:
            gc.collect(1)


def settings_line(device: torch.device, timeout_s: float, cores: set[int], threads: int) -> str:
    """What was chosen, in words."""
    words = [
        f"time-out of collectives {timeout_s:g} s",
        f"{threads} threads on {len(cores)} cores",
        f"garbage is collected every {COLLECT_EVERY} steps",
    ]
    if device.type == "cuda":
        chosen = choose_environment(timeout_s)
        words[:0] = [f"allocator {chosen['PYTORCH_CUDA_ALLOC_CONF']}"]
        records = chosen["TORCH_FR_BUFFER_SIZE"]
        words.append(f"flight recorder of {records} collectives, written on a time-out")
    else:
        words[:0] = ["allocator of the C library"]
        words.append("no flight recorder (NCCL only)")
    return "settings: " + ", ".join(words)
