"""What is saved under any layout is loaded under any other, byte by byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_samples import (
    assert_same_bytes,
    emptied,
    layout,
    make_tensors,
    wanted,
    whole_shards,
    write_as_ranks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from triptych.checkpoint import read
from triptych.checkpoint.index import SCHEMA_VERSION
from triptych.checkpoint.read import load
from triptych.checkpoint.write import save
from triptych.runtime.shard import Shard

SEEDS = st.integers(0, 10_000)
ALL_KINDS = {
    "weight": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float64,
}


@given(SEEDS, SEEDS, st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_any_layout_of_boxes_loads_any_other(before: int, after: int, old: int, new: int) -> None:
    tensors = make_tensors(before, ALL_KINDS)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_as_ranks(Path(folder), 3, layout(tensors, before, old))
        for held in layout(tensors, after, new):
            ours = emptied(held) + wanted(tensors)
            load(checkpoint, ours)
            assert_same_bytes(ours, tensors)


def test_a_scalar_is_stored_as_well(tmp_path: Path) -> None:
    scalar = {("weight", "model.scale"): torch.tensor(1.5)}
    save(tmp_path, 1, whole_shards(scalar), {})
    ours = wanted(scalar)
    load(tmp_path / "step-00000001", ours)
    assert_same_bytes(ours, scalar)


def test_views_of_one_flat_buffer_are_saved_and_loaded_in_place(tmp_path: Path) -> None:
    flat = torch.arange(20.0)
    boxes = {"a": (slice(0, 6), (2, 3)), "b": (slice(8, 20), (12,))}

    def shards(buffer: torch.Tensor) -> list[Shard]:
        return [
            Shard(
                kind="weight",
                name=name,
                shape=shape,
                box=tuple((0, size) for size in shape),
                tensor=buffer[at].view(shape),
                saved=True,
            )
            for name, (at, shape) in boxes.items()
        ]

    checkpoint = save(tmp_path, 1, shards(flat), {})
    target = torch.zeros(20)
    load(checkpoint, shards(target))
    assert torch.equal(target[:6], flat[:6])
    assert torch.equal(target[8:], flat[8:])
    assert (target[6:8] == 0).all()


def _saves(folder: Path, seed: int, ranks: int) -> str:
    tensors = make_tensors(seed)
    held = layout(tensors, seed, ranks)
    mine = held[torch.distributed.get_rank() if ranks > 1 else 0]
    state = {"position": 70, "rank": torch.distributed.get_rank() if ranks > 1 else 0}
    return str(save(folder, 10, mine, state, files={"config.json": b'{"a": 1}'}))


def _loads(checkpoint: Path, saved_seed: int, seed: int, ranks: int) -> None:
    tensors = make_tensors(saved_seed)
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    ours = emptied(layout(tensors, seed, ranks)[rank])
    load(checkpoint, ours)
    assert_same_bytes(ours, tensors)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1), (2, 4), (4, 2)])
def test_ranks_save_and_load_together(tmp_path: Path, old: int, new: int) -> None:
    paths = run_ranks(old, _saves, tmp_path, 5, old)
    checkpoint = tmp_path / "step-00000010"
    assert paths == [str(checkpoint)] * old
    run_ranks(new, _loads, checkpoint, 5, 6, new)
    assert read.state(checkpoint) == {
        "schema_version": SCHEMA_VERSION,
        "step": 10,
        "position": 70,
        "rank": 0,
    }
    assert {path.name for path in checkpoint.iterdir()} == {
        *(f"rank-{rank:05d}.safetensors" for rank in range(old)),
        *(f"rank-{rank:05d}.optimizer.safetensors" for rank in range(old)),
        "index.json",
        "state.json",
        "config.json",
        "complete.json",
    }
