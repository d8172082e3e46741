"""User case PUB-051: a write that fails is tried again; a disk that is full loses nothing.

`benchmarks/disk_faults.py` has the same with real small and read-only disks.
"""

from __future__ import annotations

from pathlib import Path

import faulty_entries as faulty
import pytest
from checkpoints import step_folder
from tiny_runs import losses
from verbs import Ranks, entry_of_ranks, job

from triptych.checkpoint.find import newest_intact
from triptych.checkpoint.folder import unfinished
from triptych.train import preflight

TRAIN = (
    *("--plan", "dp=3,zero=1", "--set", "train.steps=6", "train.global_batch=6"),
    "checkpoint.every=2",
)


def test_pub_051_a_write_that_fails_once_is_tried_again_and_told(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(tmp_path)
    entry_of_ranks(monkeypatch, faulty.write_fails_once)
    ended = ranks.done("train", path, *TRAIN)
    assert f"rank 2: WARNING: writing a checkpoint to {tmp_path}/run/checkpoints" in ended.err
    assert faulty.TEXT in ended.err and "again in 1 s" in ended.err
    assert newest_intact(tmp_path / "run") == (step_folder(tmp_path / "run", 6), [])


def test_pub_051_a_save_in_between_may_fail_the_last_one_may_not(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checkpoints = job(tmp_path), tmp_path / "run" / "checkpoints"
    settings = (*TRAIN, "checkpoint.retries=0")
    entry_of_ranks(monkeypatch, faulty.no_room_at_step_4)
    ended = ranks.done("train", path, *settings)
    assert "No space left on device" in ended.err and "training goes on" in ended.err
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000002", "step-00000006"]
    ended = ranks("train", path, *settings, "train.steps=10", "checkpoint.failures=0")
    assert ended.code == 0, ended.err  # step 4 is long past
    assert list(losses(path)) == list(range(1, 11))


def test_pub_051_all_ranks_end_with_needed_and_free_bytes_and_earlier_checkpoints_are_whole(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = job(tmp_path), tmp_path / "run"
    entry_of_ranks(monkeypatch, faulty.has_a_quota)
    ended = ranks("train", path, *TRAIN, "checkpoint.retries=0")
    assert ended.code == 1
    for words in ("File too large", "needed: ", "free: ", "earlier checkpoints are untouched"):
        assert words in ended.problems, ended.problems
    assert newest_intact(run) == (step_folder(run, 4), [])
    assert not unfinished(run / "checkpoints")


def test_pub_051_room_is_looked_at_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"needs 1024.00 TiB .* bytes free") as caught:
        preflight.disk_lines(tmp_path / "later" / "checkpoints", 1 << 50, 3, 0)
    assert getattr(caught.value, "exit_code", None) == 2
    (line,) = preflight.disk_lines(tmp_path, 1024, 3, 0)
    assert line.startswith("a checkpoint needs 1.00 KiB, 3 at a time 3.00 KiB; free in ")
