"""User case PUB-052: the newest checkpoint of this run and the best one always stay."""

from __future__ import annotations

from pathlib import Path

from checkpoints import step_folder
from tiny_runs import eval_losses
from verbs import Ranks, job

from triptych.checkpoint.find import newest_intact
from triptych.checkpoint.folder import checkpoints
from triptych.checkpoint.read import state


def steps_in(run: Path) -> list[int]:
    return sorted(step for step, _ in checkpoints(run / "checkpoints"))


def test_pub_052_the_newest_and_the_best_stay_past_every_change_of_digits(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The rate is far too high: the loss rises, and the best is not among the last."""
    path, run = job(tmp_path, num_hidden_layers=1), tmp_path / "run"
    settings = (
        *("--plan", "dp=2", "--set", "train.steps=12", "checkpoint.every=1"),
        *("train.eval_every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=true"),
        *("optimizer.learning_rate=3.0", "optimizer.warmup_steps=12", "optimizer.clip_norm=0"),
        f'data.eval="{tmp_path}/text/document-0[01].txt"',
    )
    ranks.done("train", path, *settings)
    found = eval_losses(path)
    best = min((step for step in found if step), key=found.__getitem__)
    assert best < 11, found
    assert steps_in(run) == [best, 12]
    assert state(step_folder(run, best))["eval_loss"] == found[best]
    ranks.done("train", path, *settings, "train.steps=14")  # known again after a restart
    assert {best, 14} >= set(steps_in(run)) and 14 in steps_in(run)


def test_pub_052_what_another_run_left_above_is_neither_removed_nor_counted(
    ranks: Ranks, tmp_path: Path
) -> None:
    path, run = job(tmp_path, num_hidden_layers=1), tmp_path / "run"
    settings = ("--plan", "dp=1", "--set", "checkpoint.every=1", "checkpoint.keep_last=2")
    ranks.done("train", path, *settings)
    step_folder(run, 4).rename(step_folder(run, 5000))
    (step_folder(run, 5000) / "rank-00000.safetensors").unlink()
    ended = ranks.done("train", path, *settings)
    assert steps_in(run) == [3, 4, 5000]
    assert newest_intact(run)[0] == step_folder(run, 4) and "after step 3" in ended.err
