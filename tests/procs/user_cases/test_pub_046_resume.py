"""User case PUB-046: a run saved as TP2 x PP2 goes on under any other plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tensors, keep_only, step_folder, whole_tensors
from layouts import Run, make_engine, merge
from ranks import run_ranks
from tiny_runs import losses, metrics
from verbs import Ranks, job

from triptych.checkpoint.read import load
from triptych.plan.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "pp=4": {"pp": 4},
    "tp=4": {"tp": 4},
    "dp=4": {"dp": 4},
    "tp=2,dp=2,zero=1": {"tp": 2, "dp": 2, "zero": 1},
    "dp=1": {},
}
SETTINGS = (
    *("train.steps=20", "train.microbatch=2"),
    *("checkpoint.every=10", "optimizer.warmup_steps=4"),
)


@pytest.fixture(scope="module")
def unbroken(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of a run of 20 steps."""
    path = job(tmp_path_factory.mktemp("unbroken"))
    ranks.done("train", path, "--plan", "tp=2,pp=2", "--set", *SETTINGS)
    return path


def rates(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["learning_rate"]) for line in metrics(path) if "loss" in line]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", PLANS)
def test_pub_046_losses_rates_and_steps_go_on_as_if_nothing_had_happened(
    ranks: Ranks, tmp_path: Path, unbroken: Path, plan: str
) -> None:
    path = job(tmp_path)
    shutil.copytree(unbroken.parent / "run", tmp_path / "run")
    keep_only(tmp_path / "run", 10)
    ended = ranks.done("train", path, "--plan", plan, "--set", *SETTINGS)
    assert "after step 10" in ended.err
    assert losses(path) == pytest.approx(losses(unbroken), abs=1e-5)
    assert rates(path) == rates(unbroken) and len(rates(path)) == 20


def held(plan: Plan, config: dict[str, Any], checkpoint: Path) -> Run:
    """This rank's parts of what it has loaded."""
    engine = make_engine(plan, config)
    load(checkpoint, engine.shards())
    pieces = [(s.kind, s.name, s.shape, s.box, s.tensor.numpy().copy()) for s in engine.shards()]
    return Run(tensors={("pieces", ""): pieces})  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def saved(unbroken: Path) -> Tensors:
    """The tensors of step 10."""
    return whole_tensors(step_folder(unbroken.parent / "run", 10))


@pytest.mark.parametrize("plan", PLANS)
def test_pub_046_the_moments_are_bit_equal_after_gathering(
    unbroken: Path, saved: Tensors, plan: str
) -> None:
    """The weights too."""
    assert {kind for kind, _ in saved} >= {"weight", "exp_avg", "exp_avg_sq"}
    run = unbroken.parent / "run"
    config = json.loads((run / "config.json").read_text())
    chosen = Plan.uniform(4, **PLANS[plan])
    loaded = merge(run_ranks(chosen.world_size, held, chosen, config, step_folder(run, 10)))
    assert loaded.tensors.keys() == saved.keys()
    assert all(torch.equal(loaded.tensors[key], tensor) for key, tensor in saved.items())
