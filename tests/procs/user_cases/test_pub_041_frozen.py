"""User case pub_041: frozen weights are in every checkpoint and export, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import whole_tensors
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks
from safetensors.torch import load_file
from verbs import Ranks, job, tree

from triptych.checkpoint.export import export
from triptych.checkpoint.read import load
from triptych.checkpoint.write import save
from triptych.plan.plan import Plan, Precision

CONFIG = tiny_config()
FREEZE = ("embed_tokens", "layers.0")
PRECISIONS = {"fp32": Precision(), "bf16": Precision.mixed()}
LAYOUTS: tuple[dict[str, Any], ...] = (
    *({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
    {"pp": 2},
    {"tp": 2, "sequence_parallel": True},
)


def _resumed(plan: Plan, folder: Path) -> None:
    """Trains, saves, and resumes in a model of another seed: every shard has the same bits."""
    engine = make_engine(plan, CONFIG, seed=1, freeze=FREEZE)
    before = {s.name: s.tensor.clone() for s in engine.shards() if s.name in engine.frozen}
    for step in range(3):
        rows = batch_of(step, 4, 16, CONFIG["vocab_size"])
        engine.step(split(rows, plan, engine.mesh.coordinates.dp), 1e-2)
    files = {"config.json": json.dumps(CONFIG).encode()}
    where = save(folder, 3, engine.shards(), {}, files=files)
    again = make_engine(plan, CONFIG, seed=2, freeze=FREEZE)
    load(where, again.shards())
    again.after_load(3)
    for mine, theirs in zip(again.shards(), engine.shards(), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), (mine.kind, mine.name)
        if mine.name in before:
            assert mine.kind == "weight" and torch.equal(mine.tensor, before[mine.name])
    rows = batch_of(9, 4, 16, CONFIG["vocab_size"])
    batch = split(rows, plan, engine.mesh.coordinates.dp)
    assert engine.evaluate(batch) == again.evaluate(batch)


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_pub_041_every_tensor_comes_back_bit_by_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    plan = Plan.uniform(4, **settings)

    def body() -> None:
        for name, precision in PRECISIONS.items():
            _resumed(plan.with_(precision=precision), tmp_path / name)

    run_ranks(2, body)
    for name in PRECISIONS:
        _check_export(next((tmp_path / name).iterdir()), tmp_path / f"{name} out")


def _check_export(checkpoint: Path, out: Path) -> None:
    export(checkpoint, out)
    exported = load_file(out / "model.safetensors")
    stored = whole_tensors(checkpoint)
    weights = {name: tensor for (kind, name), tensor in stored.items() if kind == "weight"}
    assert exported.keys() == weights.keys() and len(weights) == 4 * 9 + 3
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    moments = {name for kind, name in stored if kind == "exp_avg"}
    assert len(moments) == len(weights) - 1 - 9


def test_pub_041_a_job_names_what_it_freezes(ranks: Ranks, tmp_path: Path) -> None:
    path = job(tmp_path)
    settings = ("train.steps=4", 'train.freeze=["embed_tokens", "layers.0"]', "checkpoint.every=2")
    ended = ranks.done("train", path, "--plan", "dp=2,zero=3", "--set", *settings)
    assert "frozen: " in ended.err
    first, last = (whole_tensors(p) for p in sorted((tmp_path / "run" / "checkpoints").iterdir()))
    moved = {name for (kind, name), t in last.items() if not torch.equal(t, first[kind, name])}
    still = {name for kind, name in last if kind == "weight"} - moved
    assert all("embed_tokens" in name or ".layers.0." in name for name in still) and len(still) > 9
    others = ("train.steps=6", 'train.freeze=["layers.0", "norm"]')
    changed = ranks("train", path, "--plan", "dp=2,zero=3", "--set", *others)
    assert changed.code != 0
    assert "model.embed_tokens.weight was frozen then" in changed.err
    assert "model.norm.weight is frozen now" in changed.err


def test_pub_041_a_pattern_that_matches_nothing_stops_before_anything_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = job(tmp_path)
    before = tree(tmp_path)
    ended = ranks("train", path, "--set", 'train.freeze=["embed_token"]')
    assert ended.code == 2 and tree(tmp_path) == before
    assert "'embed_token'" in ended.problems and "embed_tokens" in ended.problems
