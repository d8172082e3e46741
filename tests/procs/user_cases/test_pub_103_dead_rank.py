"""User case PUB-103: one of TP2 x PP2 ranks dies, all end soon and the first cause is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import faulty_entries as faulty
import psutil
import pytest
from checkpoints import step_folder
from tiny_runs import losses
from verbs import Ranks, entry_of_ranks, job

from triptych.checkpoint.find import newest_intact
from triptych.train.result import Summary
from triptych.train.status import read_status

TRAIN = (
    *("--plan", "tp=2,pp=2", "--set"),
    *("train.steps=4", "train.microbatch=4", "checkpoint.every=1"),
    "checkpoint.asynchronous=false",  # what is complete at which step does not depend on the disk
)
STEP = "forward/backward"
WAYS: dict[str, tuple[Callable[[str], Summary], str, list[str]]] = {
    "loader": (faulty.raises_in_data, "data", [f"OSError: {faulty.TEXT}", "microbatches"]),
    "forward": (faulty.raises_in_forward, STEP, [f"ValueError: {faulty.TEXT}", "in forward"]),
    "saving": (faulty.raises_in_saving, "save", [faulty.TEXT, "checkpoint of step 3"]),
    "SIGKILL": (faulty.is_killed, STEP, ["killed by SIGKILL", "ran out of memory"]),
    "exit code 0": (faulty.leaves_silently, STEP, ["exit code 0 in the middle of the run"]),
    "sys.exit(0)": (faulty.exits_politely, STEP, ["SystemExit: 0"]),
    "memory": (faulty.runs_out_of_memory, STEP, ["allocate memory", "torch.zeros"]),
}


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("way", WAYS)
def test_pub_103_all_ranks_end_soon_and_the_last_lines_name_the_rank_that_died(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Rank 2 at step 3, in each way."""
    entry, phase, words = WAYS[way]
    path, run = job(tmp_path), tmp_path / "run"
    entry_of_ranks(monkeypatch, entry)
    before = processes()
    ended = ranks("train", path, *TRAIN)
    assert time.time() - float((run / "failing").read_text()) < 10
    assert ended.code == 1
    assert processes() <= before, "no rank is left"
    statuses = [read_status(run / "status" / f"rank-{rank}") for rank in range(4)]
    pids = [status.pid for status in statuses if status is not None]
    assert len(pids) == 4
    assert not [p for pid in pids for p in Path("/dev/shm").glob(f"*_{pid}_*")]
    first, *last = ended.err[ended.err.rindex("error:\n") :].splitlines()[1:]
    assert len(last) < 15
    assert first.startswith("training failed: rank 2, host ")
    assert f"step 3, phase {phase}" in first
    assert all(word in "\n".join(last) for word in words), "\n".join(last)
    assert "Connection closed" not in ended.err[ended.err.rindex("error:\n") :]
    assert last[-1].endswith(str(step_folder(run, 2)))
    assert newest_intact(run) == (step_folder(run, 2), [])


def test_pub_103_the_same_command_goes_on_from_the_checkpoint_before_the_death(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses of a run in which nobody died."""
    path = job(tmp_path / "whole")
    ranks.done("train", path, "--plan", "dp=1", *TRAIN[2:])
    whole, path = losses(path), job(tmp_path / "broken")
    with monkeypatch.context() as patch:
        entry_of_ranks(patch, faulty.is_killed)
        assert ranks("train", path, *TRAIN).code == 1
    ended = ranks.done("train", path, *TRAIN)
    assert "after step 2" in ended.err
    assert losses(path) == pytest.approx(whole, abs=1e-5)
