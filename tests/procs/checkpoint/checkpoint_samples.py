"""Tensors cut in any way over any number of pretended ranks, and checkpoints made of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from triptych.checkpoint.folder import checkpoints
from triptych.checkpoint.write import finish, publish, save, write_shards
from triptych.plan.layout import Box, box_shape
from triptych.runtime.shard import Shard

Tensors = Mapping[tuple[str, str], torch.Tensor]

NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
SHAPES = ((11, 6), (5, 6), (6,))


def make_tensors(
    seed: int = 0,
    kinds: Mapping[str, torch.dtype] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> dict[tuple[str, str], torch.Tensor]:
    """Random logical tensors of each kind."""
    generator = torch.Generator().manual_seed(seed)
    kinds = kinds or {"weight": torch.float32, "exp_avg": torch.float32}
    return {
        (kind, name): torch.randn(shape, generator=generator).to(dtype)
        for kind, dtype in kinds.items()
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def cut(box: Box, rng: random.Random) -> list[Box]:
    """A random way to cut a box by straight cuts."""
    sides = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
    if not sides or rng.random() < 0.3:
        return [box]
    dim = rng.choice(sides)
    start, stop = box[dim]
    at = rng.randint(start + 1, stop - 1)
    halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((start, at), (at, stop))]
    return [part for half in halves for part in cut(half, rng)]


def shard_of(
    tensor_id: tuple[str, str], whole: torch.Tensor, box: Box, saved: bool = True
) -> Shard:
    """A copy of a box of a logical tensor."""
    kind, name = tensor_id
    part = whole[tuple(slice(*side) for side in box)].clone()
    return Shard(kind=kind, name=name, shape=tuple(whole.shape), box=box, tensor=part, saved=saved)


def layout(tensors: Tensors, seed: int, ranks: int) -> list[list[Shard]]:
    """Every tensor cut at random, its boxes dealt to the ranks; some hold copies too."""
    rng = random.Random(seed)
    held: list[list[Shard]] = [[] for _ in range(ranks)]
    for tensor_id, whole in tensors.items():
        for box in cut(tuple((0, size) for size in whole.shape), rng):
            owner = rng.randrange(ranks)
            for rank in range(ranks):
                if rank == owner or rng.random() < 0.2:
                    held[rank].append(shard_of(tensor_id, whole, box, saved=rank == owner))
    return held


def whole_shards(tensors: Tensors) -> list[Shard]:
    """One process that holds everything."""
    return [
        shard_of(tensor_id, whole, tuple((0, size) for size in whole.shape))
        for tensor_id, whole in tensors.items()
    ]


def emptied(shards: Sequence[Shard]) -> list[Shard]:
    """The same shards with nothing in them yet."""
    return [
        Shard(
            kind=shard.kind,
            name=shard.name,
            shape=shard.shape,
            box=shard.box,
            tensor=torch.full_like(shard.tensor, float("nan")),
            saved=shard.saved,
        )
        for shard in shards
    ]


def wanted(tensors: Tensors, dtype: torch.dtype | None = None) -> list[Shard]:
    """Empty whole shards like `tensors`, in their dtype or another."""
    return [
        Shard(
            kind=kind,
            name=name,
            shape=tuple(whole.shape),
            box=tuple((0, size) for size in whole.shape),
            tensor=torch.full_like(whole, float("nan"), dtype=dtype),
            saved=True,
        )
        for (kind, name), whole in tensors.items()
    ]


def write_as_ranks(
    folder: Path,
    step: int,
    held: Sequence[Sequence[Shard]],
    files: Mapping[str, bytes] | None = None,
    **state: Any,
) -> Path:
    """A checkpoint of several ranks, written by this one process."""
    temporary = folder / f"step-{step:08d}.tmp-00"
    temporary.mkdir(parents=True)
    stored = [
        file for rank, shards in enumerate(held) for file in write_shards(temporary, rank, shards)
    ]
    finish(temporary, step, stored, state, files or {"config.json": b"{}"})
    return publish(temporary, step)


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    """One checkpoint a step, by one process."""
    for step in steps:
        save(folder, step, whole_shards(make_tensors(step)), {"position": step * 7}, **options)


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints by name, ascending."""
    return sorted(step for step, _ in checkpoints(folder))


def assert_same_bytes(shards: Sequence[Shard], tensors: Tensors) -> None:
    """Every shard is the part of the logical tensor that its box says, bit by bit."""
    for shard in shards:
        whole = tensors[shard.kind, shard.name]
        expected = whole[tuple(slice(*side) for side in shard.box)]
        assert shard.tensor.shape == expected.shape == box_shape(shard.box)
        assert torch.equal(as_bytes(shard.tensor), as_bytes(expected))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in memory order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
