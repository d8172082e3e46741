"""User case PUB-018: gradients that are not finite reach no weight, and no good checkpoint goes."""

from __future__ import annotations

from pathlib import Path

import faulty_entries as faulty
import pytest
from checkpoints import step_folder, whole_tensors
from tiny_runs import losses, metrics
from verbs import Ranks, entry_of_ranks, job

TRAIN = (
    *("--plan", "tp=2,pp=2", "--set", "train.steps=10", "train.microbatch=4"),
    *("checkpoint.every=2", "checkpoint.keep_last=2"),
)


def test_pub_018_the_run_stops_before_the_update_and_goes_on_from_the_last_healthy_checkpoint(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = job(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        entry_of_ranks(patch, faulty.has_infinite_gradient_at_7)
        ended = ranks("train", path, *TRAIN)
    assert ended.code == 1
    for words in ("step 7: loss", "norm inf", "not finite in model.", "step-00000006"):
        assert words in ended.problems, ended.problems
    for step in (4, 6):
        assert all(t.isfinite().all() for t in whole_tensors(step_folder(run, step)).values())
    assert "after step 6" in ranks.done("train", path, *TRAIN).err
    assert list(losses(path)) == list(range(1, 11))


def test_pub_018_steps_are_skipped_together_and_not_too_many_in_a_row(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(tmp_path)
    skips = (*TRAIN, "train.non_finite=skip", "train.max_skipped=3")
    entry_of_ranks(monkeypatch, faulty.has_infinite_gradients_from_3_to_6)
    ended = ranks("train", path, *skips)
    assert ended.code == 1 and "at most 3 steps in a row" in ended.problems
    assert "step 6: loss" in ended.problems
    assert ended.err.count(" in a row)") == 3
    steps = [line["step"] for line in metrics(path) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5]
