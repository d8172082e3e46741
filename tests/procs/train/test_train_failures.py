"""All ranks of TP2 x PP2 fail at once, or train on what is not finite.

One rank that fails is user case PUB-103: `tests/procs/user_cases/test_pub_103_dead_rank.py`.
"""

from __future__ import annotations

import os
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


def test_if_all_ranks_leave_silently_the_launch_ends(job_path: Path) -> None:
    """User case pub_103. Ranks that waited for each other would do so for ten minutes."""
    text = last_words(job_path, faulty.all_leave_silently)
    assert "exit code 0 in the middle of the run" in text


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
