"""A checkpoint and a model have the same tensors, or the message names every difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import (
    NAMES,
    assert_same_bytes,
    make_tensors,
    wanted,
    whole_shards,
)
from ranks import run_ranks

from triptych.checkpoint.read import load
from triptych.checkpoint.write import save
from triptych.errors import CheckpointError

BF16_RUN = {"weight": torch.bfloat16, "master": torch.float32}


def saved(folder: Path, **kinds: torch.dtype) -> Path:
    return save(folder, 10, whole_shards(make_tensors(1, kinds)), {})


def test_missing_renamed_unknown_and_misshapen_tensors_are_all_named_at_once(
    tmp_path: Path,
) -> None:
    """User case pub_047."""
    tensors = {
        ("weight", "model.embed_tokens.weight"): torch.zeros(11, 6),
        ("weight", "model.layers.0.mlp.up_project.weight"): torch.zeros(5, 6),
        ("weight", "model.extra.weight"): torch.zeros(3),
        ("weight", "model.norm.weight"): torch.zeros(7),
    }
    checkpoint = save(tmp_path, 10, whole_shards(tensors), {})
    ours = wanted({**make_tensors(), ("weight", "lm_head.weight"): torch.zeros(11, 6)})
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, [shard for shard in ours if shard.kind == "weight"])
    text = str(caught.value)
    assert "lacks 2 tensors: " in text
    assert "weight/model.layers.0.mlp.up_proj.weight" in text
    assert "weight/lm_head.weight" in text
    assert "is 'model.layers.0.mlp.up_project.weight' meant" in text
    assert "2 tensors too many: " in text
    assert "weight/model.extra.weight" in text
    assert "weight/model.norm.weight has shape [7]" in text and "[6]" in text
    assert all(shard.tensor.isnan().all() for shard in ours)


def test_missing_moments_are_named(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, weight=torch.float32)
    with pytest.raises(CheckpointError, match=r"lacks 3 tensors: exp_avg/model.embed_tokens"):
        load(checkpoint, wanted(make_tensors()))


def test_an_unknown_moment_is_named_when_moments_are_wanted(tmp_path: Path) -> None:
    tensors = {**make_tensors(), ("exp_avg", "model.extra.weight"): torch.zeros(2)}
    checkpoint = save(tmp_path, 10, whole_shards(tensors), {})
    with pytest.raises(CheckpointError, match=r"exp_avg/model.extra.weight"):
        load(checkpoint, wanted(make_tensors()))


def test_weights_alone_load_without_the_moments(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    checkpoint = save(tmp_path, 10, whole_shards(tensors), {})
    ours = [shard for shard in wanted(tensors) if shard.kind == "weight"]
    load(checkpoint, ours)
    assert_same_bytes(ours, tensors)


def test_a_long_list_of_names_ends_with_a_count(tmp_path: Path) -> None:
    tensors = {("weight", f"model.layers.{i}.norm.weight"): torch.zeros(1) for i in range(20)}
    checkpoint = save(tmp_path, 10, whole_shards(tensors), {})
    with pytest.raises(CheckpointError, match=r"20 tensors too many: .* and 8 more"):
        load(checkpoint, [])


def _load_a_share(checkpoint: Path) -> str:
    """Each rank wants tensors of its own, as pipeline stages do; rank 1 wants one too many."""
    names = {0: NAMES[:1], 1: (*NAMES[1:], "model.layers.7.mlp.up_proj.weight")}[dist.get_rank()]
    tensors = {("weight", name): torch.zeros(6) for name in names}
    try:
        load(checkpoint, wanted(tensors))
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_ranks_that_hold_different_tensors_raise_the_same_error(tmp_path: Path) -> None:
    tensors = {("weight", name): torch.zeros(6) for name in NAMES}
    checkpoint = save(tmp_path, 10, whole_shards(tensors), {})
    errors = run_ranks(2, _load_a_share, checkpoint)
    assert errors[0] == errors[1]
    assert "lacks 1 tensor: weight/model.layers.7.mlp.up_proj.weight" in errors[0]


def test_a_master_is_filled_from_the_weight_of_an_fp32_run(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, weight=torch.float32)
    stored = make_tensors(1, {"weight": torch.float32})
    ours = wanted(make_tensors(1, BF16_RUN))
    load(checkpoint, ours)
    for shard in ours:
        expected = stored["weight", shard.name].to(shard.tensor.dtype)
        assert torch.equal(shard.tensor, expected)


def test_an_fp32_weight_is_filled_from_the_master_of_a_bf16_run(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, **BF16_RUN)
    stored = make_tensors(1, BF16_RUN)
    ours = wanted(make_tensors(1, {"weight": torch.float32}))
    load(checkpoint, ours)
    assert all(torch.equal(s.tensor, stored["master", s.name]) for s in ours)


def test_a_bf16_weight_of_a_bf16_run_is_the_stored_one(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, **BF16_RUN)
    ours = wanted(make_tensors(1, {"weight": torch.bfloat16}))
    load(checkpoint, ours)
    assert_same_bytes(ours, make_tensors(1, BF16_RUN))


def test_moments_are_converted_to_the_dtype_of_the_plan(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, weight=torch.float32, exp_avg=torch.float32)
    stored = make_tensors(1)
    ours = wanted(stored, dtype=torch.float64)
    load(checkpoint, ours)
    assert all(torch.equal(s.tensor, stored[s.kind, s.name].double()) for s in ours)


def test_a_dtype_that_is_not_floating_point_cannot_be_saved(tmp_path: Path) -> None:
    shards = whole_shards(make_tensors())
    shards[0] = replace(shards[0], tensor=shards[0].tensor.to(torch.int64))
    with pytest.raises(CheckpointError, match=r"torch.int64 cannot be stored"):
        save(tmp_path, 10, shards, {})
    assert list(tmp_path.iterdir()) == []
