"""Do ranks that hold the same part of a parameter hold the same bits?

Replicated parameters (norms under tensor parallelism, everything under data parallelism, a tied
embedding on two stages) stay bitwise equal for as long as every rank applies the same update.

Where ranks cut a parameter differently (a tied embedding on stages with other degrees) it is
compared in the cells of all their cuts.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist

from triptych.plan.layout import Box, box_elements
from triptych.plan.reshard import slices
from triptych.runtime.shard import Shard

Cuts = Sequence[Sequence[int]]
"""Where a parameter is cut, ascending, along each dimension."""


def differing_replicas(shards: list[Shard]) -> list[str]:
    """The parameters whose copies differ, with the ranks by value; collective.

    Cost: boxes and a checksum per weight and rank travel, no tensor.
    """
    weights = [shard for shard in shards if shard.kind == "weight"]
    held = {(shard.name, shard.shape, shard.box) for shard in weights}
    cuts = _cuts(set().union(*_from_all_ranks(held)))
    mine = [
        (shard.name, cell, checksum(shard.tensor[slices(cell, shard.box)]))
        for shard in weights
        for cell in _cells(shard, cuts)
    ]
    ranks: dict[tuple[str, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows in enumerate(_from_all_ranks(mine)):
        for name, box, code in rows:
            ranks[name, box][code].append(rank)
    differing = {
        f"{name}: ranks " + " differ from ranks ".join(str(held) for held in by_code.values()): None
        for (name, _), by_code in sorted(ranks.items())
        if len(by_code) > 1
    }
    return list(differing)


def _from_all_ranks(mine: Any) -> list[Any]:
    gathered: list[Any] = [mine]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
    return gathered


def _cuts(held: set[tuple[str, tuple[int, ...], Box]]) -> Mapping[str, Cuts]:
    """The cuts of the parameters of which some boxes overlap without being the same."""
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = defaultdict(list)
    for name, shape, box in held:
        boxes[name, shape].append(box)
    return {
        name: [sorted({edge for box in found for edge in box[dim]}) for dim in range(len(shape))]
        for (name, shape), found in boxes.items()
        if sum(map(box_elements, found)) > math.prod(shape)
    }


def _cells(shard: Shard, cuts: Mapping[str, Cuts]) -> Iterator[Box]:
    """The box of a shard, in as many parts as others' cuts make of it."""
    if shard.name not in cuts:
        yield shard.box
        return
    sides = [
        list(pairwise(edge for edge in edges if start <= edge <= stop))
        for edges, (start, stop) in zip(cuts[shard.name], shard.box, strict=True)
    ]
    yield from product(*sides)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    raw = tensor.detach().contiguous().cpu().view(torch.uint8)
    return zlib.crc32(raw.numpy().data)
