"""One rank of TP2 x PP2 fails: all end soon, the first cause is told, the checkpoint is usable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import faulty_entries as faulty
import pytest
from tiny_runs import eval_losses, losses, make_job, run_job

from triptych.checkpoint.find import newest_complete
from triptych.errors import RunError
from triptych.train.result import Summary
from triptych.train.status import read_status

PLAN = ("parallel.plan=tp=2,pp=2", "train.steps=6", "checkpoint.every=2")


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    return make_job(tmp_path)


def last_words(job_path: Path, entry: Callable[[str], Summary]) -> str:
    """What a failing run says in the end; no process of it is left."""
    with pytest.raises(RunError) as caught:
        run_job(job_path, *PLAN, entry=entry)
    for path in (job_path.parent / "run" / "status").iterdir():
        status = read_status(path)
        assert status is not None
        with pytest.raises(ProcessLookupError):
            os.kill(status.pid, 0)
    text = str(caught.value)
    assert len(text.splitlines()) <= 15
    return text


@pytest.mark.parametrize(
    ("entry", "phase", "words"),
    [
        (faulty.raises_in_step, "forward/backward", f"ValueError: {faulty.TEXT}"),
        (faulty.raises_in_data, "data", f"OSError: {faulty.TEXT}"),
        (faulty.is_killed, "forward/backward", "killed by SIGKILL"),
        (faulty.leaves_silently, "forward/backward", "exit code 0 in the middle of the run"),
        (faulty.exits_politely, "forward/backward", "SystemExit"),
        (faulty.runs_out_of_memory, "forward/backward", f"MemoryError: {faulty.TEXT}"),
    ],
)
def test_a_rank_that_fails_in_a_step_is_named_and_the_run_can_go_on(
    job_path: Path, entry: Callable[[str], Summary], phase: str, words: str
) -> None:
    text = last_words(job_path, entry)
    first = text.splitlines()[0]
    assert "rank 2" in first and "step 3" in first and f"phase {phase}" in first
    assert words in text
    assert "step-00000002" in text.splitlines()[-1]
    assert "Connection closed" not in text
    assert newest_complete(job_path.parent / "run")[0] is not None


def test_a_rank_that_fails_in_saving_is_named(job_path: Path) -> None:
    text = last_words(job_path, faulty.raises_in_saving)
    first = text.splitlines()[0]
    assert "rank 2" in first and "step 4" in first and "phase save" in first
    assert faulty.TEXT in text
    assert "step-00000002" in text.splitlines()[-1]


def test_if_all_ranks_leave_silently_the_launch_ends(job_path: Path) -> None:
    begun_s = time.monotonic()
    text = last_words(job_path, faulty.all_leave_silently)
    assert "exit code 0 in the middle of the run" in text
    assert time.monotonic() - begun_s < 60


def test_an_infinite_gradient_stops_the_run_before_it_is_saved_and_it_goes_on_from_before(
    job_path: Path,
) -> None:
    text = last_words(job_path, faulty.has_infinite_gradient)
    assert "step 3: loss" in text and "gradient norm inf" in text
    assert newest_complete(job_path.parent / "run")[0] == (
        job_path.parent / "run" / "checkpoints" / "step-00000002"
    )
    run_job(job_path, *PLAN)
    broken = losses(job_path)
    whole = make_job(job_path.parent / "whole")
    run_job(whole, *PLAN)
    assert broken == pytest.approx(losses(whole), abs=1e-6)
    assert eval_losses(whole) == {}
