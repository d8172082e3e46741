"""User case PUB-106: a run that is asked to end finishes its step, saves once and ends with 75."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faulty_entries as faulty
import pytest
from checkpoints import step_folder
from tiny_runs import losses
from verbs import Ranks, entry_of_ranks, job

from triptych.checkpoint.find import newest_intact
from triptych.checkpoint.folder import checkpoints
from triptych.train.result import Summary

TRAIN = (
    *("--plan", "dp=3", "--set", "train.steps=8", "train.global_batch=6"),
    *("checkpoint.grace_s=20", "optimizer.learning_rate=3e-3"),
)


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the unbroken run."""
    path = job(tmp_path_factory.mktemp("whole"))
    ranks.done("train", path, *TRAIN)
    return losses(path)


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        (faulty.is_asked_to_end, ()),  # one rank, in a step
        (faulty.terminates_the_launcher, ()),  # in a step, and again in its save
        (faulty.asks_the_launcher, ("checkpoint.every=2",)),
    ],
)
def test_pub_106_it_goes_on_as_the_unbroken_run(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[int, float],
    entry: Callable[[str], Summary],
    settings: tuple[str, ...],
) -> None:
    path, run = job(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        entry_of_ranks(patch, entry)
        ended = ranks("train", path, *TRAIN, *settings)
    assert ended.code == 75, ended.err
    assert "ended by" in ended.err and "the same command goes on" in ended.err
    last = max(losses(path))
    assert 3 <= last < 8
    assert newest_intact(run) == (step_folder(run, last), [])
    if not settings:
        assert [step for step, _ in checkpoints(run / "checkpoints")] == [last]
    ranks.done("train", path, *TRAIN, *settings)
    assert losses(path) == pytest.approx(whole, abs=1e-6)
