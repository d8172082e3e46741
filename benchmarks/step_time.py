"""CPU seconds of a training step: Triptych against the tools that people use.

DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, `pipelining`, DeepSpeed: same module (the library's
Llama with one attention function), same loss function, same fused AdamW and clipping, same global
batch and micro-batches. Both live in the same processes and take turns, so that noise of the
machine hits both; CPU seconds are of all threads, summed over the ranks. Before a pair is timed,
both train two steps from the same weights, and their losses must agree.

The loss of DTensor is its own (`loss_parallel`): no other knows its divided vocabulary.

    python benchmarks/step_time.py [--ranks 2] [--pairs 15] [--only ZeRO-3] [--json]
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from sides.options import chosen_pairs, read_options
from sides.pairs import Pair
from sides.ranks import on_ranks
from sides.rows import ratio_row, show
from sides.setting import Trainer

TOLERANCE = 1e-4
"""Relative difference of fp32 losses after an update."""


def cpu_seconds(step: Trainer, index: int) -> float:
    """CPU seconds of one step over all ranks and threads."""
    dist.barrier()
    began_s = time.process_time()
    step(index)
    spent = torch.tensor([time.process_time() - began_s], dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


def require_same_losses(pair: Pair, ours: Trainer, theirs: Trainer) -> None:
    """Trains two steps on both sides; raises if they do not do the same work."""
    for index in range(2):
        mine, other = ours(index), theirs(index)
        if not abs(mine - other) <= TOLERANCE * abs(other):
            raise RuntimeError(f"{pair.name} and {pair.peer}, step {index}: {mine} and {other}")


def compare(pair: Pair, ranks: int, count: int) -> dict[str, Any]:
    """The ratios of interleaved steps of a pair, on one of its ranks."""
    setting = pair.setting(ranks)
    ours, theirs = pair.ours(setting), pair.theirs(setting)
    require_same_losses(pair, ours, theirs)
    found = []
    for index in range(count):
        order = (ours, theirs) if index % 2 == 0 else (theirs, ours)
        spent = {id(step): cpu_seconds(step, index) for step in order}
        found.append((spent[id(ours)], spent[id(theirs)]))
    claim = f"training step, {pair.name}, {ranks} ranks"
    return ratio_row(claim, pair.peer_version, "CPU s per step", found)


def main() -> None:
    options = read_options(__doc__, ranks=2, pairs=15)
    pairs = chosen_pairs(options.only)
    count, ranks = options.pairs, options.ranks
    rows = [on_ranks(ranks, partial(compare, pair, ranks, count))[0] for pair in pairs]
    show(rows, options.json)


if __name__ == "__main__":
    main()
