"""Muon in a job: refused where matrices are cut, resumed on other ranks where they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import losses
from verbs import Ranks, job

from triptych.plan.toml import read_plan

MUON = ("--set", 'optimizer.name="muon"', "train.steps=4", "checkpoint.every=2")


def test_a_run_goes_on_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    path = job(tmp_path)
    ranks.done("train", path, "--plan", "dp=2,zero=1", *MUON)
    whole = losses(path)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000004").rename(tmp_path / "kept")
    ended = ranks.done("train", path, "--plan", "pp=2", *MUON)
    assert "after step 2" in ended.err
    assert losses(path) == pytest.approx(whole, abs=1e-3)  # updates are made in bf16


def test_no_plan_cuts_a_matrix(ranks: Ranks, tmp_path: Path) -> None:
    path = job(tmp_path)
    ended = ranks("train", path, "--plan", "tp=2", *MUON)
    assert ended.code == 2 and "optimizer=muon with tp=2" in ended.problems
    ranks.done("train", path, "--plan", "auto", "--set", "parallel.ranks=2", *MUON[1:])
    plan = read_plan(tmp_path / "run" / "plan.toml")
    assert plan.tp == 1 and plan.zero <= 1 and plan.world_size == 2
