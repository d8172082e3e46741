"""User case PUB-049: an incomplete checkpoint is skipped aloud; a run never starts from zero."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import step_folder
from tiny_runs import losses, metrics
from verbs import Ranks, job, tree

STEPS = (10, 20, 30)
FILES = {  # file -> the plan that resumes
    "rank-00001.safetensors": "tp=2",
    "rank-00000.safetensors": "tp=2",
    "rank-00001.optimizer.safetensors": "tp=2",
    "rank-00000.optimizer.safetensors": "dp=1",
    "complete.json": "dp=1",
    "index.json": "dp=1",
    "state.json": "dp=1",
    "config.json": "dp=1",
    "tokenizer.json": "dp=1",
    "tokenizer_config.json": "dp=1",
}
SETTINGS = (
    *("--set", "train.steps=30", "train.global_batch=4", "train.microbatch=4"),
    *("checkpoint.every=10", "checkpoint.keep_last=3"),
)


@pytest.fixture(scope="module")
def path(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of a run with three checkpoints of two ranks."""
    path = job(tmp_path_factory.mktemp("three"), num_hidden_layers=2)
    ranks.done("train", path, "--plan", "tp=2", *SETTINGS)
    newest = step_folder(path.parent / "run", STEPS[-1])
    assert {file.name for file in newest.iterdir()} == set(FILES)
    return path


@pytest.fixture(scope="module")
def whole(path: Path) -> dict[int, float]:
    """The losses of that run."""
    return losses(path)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("file", "plan"), [*FILES.items()])
def test_pub_049_each_missing_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    ranks: Ranks, path: Path, whole: dict[int, float], file: str, plan: str
) -> None:
    """The same samples again, to the same losses; that writes the checkpoint again."""
    newest = step_folder(path.parent / "run", 30)
    (newest / file).unlink()
    ended = ranks.done("train", path, "--plan", plan, *SETTINGS)
    (warning,) = [line for line in ended.err.splitlines() if "step-00000030 is skipped" in line]
    assert file in warning and "missing" in warning
    assert f"resumed from {newest.with_name('step-00000020')} after step 20" in ended.err
    assert [line["step"] for line in metrics(path) if "loss" in line] == list(range(1, 31))
    assert losses(path) == pytest.approx(whole, abs=1e-5)


def test_pub_049_if_no_checkpoint_is_complete_nothing_starts_and_all_are_named(
    ranks: Ranks, path: Path
) -> None:
    """Runs after the others, on their run."""
    for step, file in zip(STEPS, ("state.json", "index.json", "complete.json"), strict=True):
        (step_folder(path.parent / "run", step) / file).unlink()
    before = tree(path.parent)
    ended = ranks("train", path, "--plan", "dp=1", *SETTINGS)
    assert ended.code == 2 and tree(path.parent) == before
    assert all(f"step-{step:08d}" in ended.problems for step in STEPS)
    for words in ("state.json", "index.json", "complete.json", "never silently starts from zero"):
        assert words in ended.problems
