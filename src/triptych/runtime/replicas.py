"""Do ranks that hold the same part of a parameter hold the same bits?

Replicated parameters (norms under tensor parallelism, everything under data parallelism, a tied
embedding on two stages) stay bitwise equal for as long as every rank applies the same update.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from triptych.plan.layout import Box
from triptych.runtime.shard import Shard


def differing_replicas(shards: list[Shard]) -> list[str]:
    """The parameters whose copies differ, with the ranks by value; collective.

    Cost: one checksum per weight and rank travels, no tensor.
    """
    mine = [
        (shard.name, shard.box, checksum(shard.tensor))
        for shard in shards
        if shard.kind == "weight"
    ]
    gathered: list[Any] = [mine]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
    ranks: dict[tuple[str, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows in enumerate(gathered):
        for name, box, code in rows:
            ranks[name, box][code].append(rank)
    return [
        f"{name}: ranks " + " differ from ranks ".join(str(held) for held in by_code.values())
        for (name, _), by_code in sorted(ranks.items())
        if len(by_code) > 1
    ]


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8)
    return zlib.crc32(raw.numpy().data)
