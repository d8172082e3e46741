"""How large an engine is; what is left open is measured."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.errors import InputError, Problem
from triptych.serve.core.limits import Limits

BUDGET = 2048
"""Tokens of a step: prompts that wait are computed together, and decodes wait for them; where an
objective for these is set, `core.order.Pace` takes less.
"""
CPU_AHEAD_BELOW_S = 0.01
"""On CPUs the host's part of a step is under a millisecond. On GPUs it issues kernels besides, and
these must not wait for the step before.
"""
CPU_SHARE, GPU_SHARE = 0.4, 0.8
"""Of the memory that is free once weights are loaded, what keys and values may take: a machine has
other uses for its own, a device mostly none.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes of an engine, as in `Limits`, and what it runs on.

    Args:
        max_running: sequences that run at once.
        max_waiting: requests that wait at once.
        token_budget: tokens of a step; None: 2048 (and above `max_running`).
        block_size: tokens of a block.
        context: longest prompt and answer; None: what the model can take.
        num_blocks: blocks of keys and values; None: as many as all running sequences could fill,
            or 80 % of a device's memory that is free once the weights are loaded (40 % of a
            machine's).
        cache_bytes: of a rank's memory for keys and values, where that is known; None: measured.
        engines_here: engines on this machine, which share its memory (devices are their own).
        growth_tokens: room left for each running sequence when another one starts.
        prefix_reuse: whether equal prefixes share blocks.
        kernels: whether compiled kernels are used where they fit; else everything runs in torch.

    """

    max_running: int = 256
    max_waiting: int = 4096
    token_budget: int | None = None
    block_size: int = 16
    context: int | None = None
    num_blocks: int | None = None
    cache_bytes: int | None = None
    engines_here: int = 1
    growth_tokens: int = 32
    prefix_reuse: bool = True
    kernels: bool = True

    def limits(self, num_blocks: int, context: int, stages: int, device: torch.device) -> Limits:
        """What the scheduler keeps to."""
        return Limits(
            num_blocks=num_blocks,
            block_size=self.block_size,
            model_context=context,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            token_budget=self.token_budget or max(BUDGET, self.max_running + 1),
            growth_tokens=self.growth_tokens,
            stages=stages,
            ahead_below_s=CPU_AHEAD_BELOW_S if device.type == "cpu" else math.inf,
            overlap_chunks=stages > 1,
            prefix_reuse=self.prefix_reuse,
        )

    def model_context(self, most: int) -> int:
        """The longest prompt and answer. Raises InputError above what the model can take."""
        if self.context is not None and not 1 <= self.context <= most:
            works = f"from 1 to {most}, the positions of the model"
            raise InputError(Problem(f"context = {self.context}", works=works))
        return self.context or most

    def blocks(self, block_bytes: int, context: int, device: torch.device, ranks_here: int) -> int:
        """Blocks of the pool on a rank, of `ranks_here` that share this machine's memory."""
        if self.num_blocks is not None:
            return self.num_blocks
        useful = self.max_running * -(-context // self.block_size)
        free = free_bytes(device) if self.cache_bytes is None else self.cache_bytes
        share = GPU_SHARE if device.type == "cuda" else CPU_SHARE / (ranks_here * self.engines_here)
        fits = int(free if self.cache_bytes is not None else share * free) // block_bytes
        if fits < 1:
            what = f"{free} bytes are free, a block of keys and values takes {block_bytes}"
            works = "a smaller model, fewer ranks on this machine, or num_blocks as given"
            raise InputError(Problem(what, works=works))
        return min(useful, fits)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken: on the device, or on this machine within its limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        found = [int(available.split()[1]) * 1024]
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        found += [] if most == "max" else [int(most) - used]
    except (OSError, StopIteration, ValueError):
        pass  # no such files: what is known so far
    return min(found)
