"""The first cause of a failed run, and the last words about it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from triptych.errors import DataError
from triptych.train.failure import (
    RankEnd,
    first_cause,
    is_lost_peer,
    last_words,
    rank_ends,
    write_error,
)
from triptych.train.folder import RunFolder
from triptych.train.status import Phase, StatusFile, read_status

LOST = "[..pair.cc:547] Connection closed by peer [127.0.0.1]:1234. a remote worker crashing"


def fail(run: RunFolder, rank: int, error: Exception, step: int = 3) -> None:
    """Writes what a rank leaves that raises `error` in a step."""
    status = StatusFile(run.status(rank))
    status.set(step, Phase.STEP)
    try:
        raise error
    except Exception as raised:
        write_error(run, rank, status.now, raised)


def live(run: RunFolder, rank: int, phase: Phase = Phase.STEP) -> None:
    StatusFile(run.status(rank)).set(3, phase)


def words(run: RunFolder, *codes: int | None) -> str:
    return last_words(run, rank_ends(run, codes), None)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_the_rank_that_failed_by_itself_is_named_though_others_failed_before_it_was_written(
    run: RunFolder,
) -> None:
    """User case pub_103."""
    fail(run, 0, RuntimeError(LOST))
    fail(run, 1, RuntimeError(LOST))
    fail(run, 2, ValueError("the unique text"))
    text = words(run, 1, 1, 1)
    assert text.splitlines()[0].startswith("training failed: rank 2, host ")
    assert "step 3, phase forward/backward" in text
    assert "ValueError: the unique text" in text
    assert "Connection closed" not in text
    assert "rank-0.txt, rank-1.txt" in text
    assert "the unique text" in run.error(2).read_text()
    assert len(text.splitlines()) <= 15


def test_of_two_own_errors_the_earlier_is_the_cause(run: RunFolder) -> None:
    fail(run, 1, ValueError("first"))
    time.sleep(0.01)
    fail(run, 0, ValueError("second"))
    cause = first_cause(rank_ends(run, [1, 1]))
    assert cause is not None and cause.rank == 1


def test_a_killed_rank_is_named_with_its_signal(run: RunFolder) -> None:
    """User case pub_103."""
    fail(run, 0, RuntimeError(LOST))
    live(run, 1)
    live(run, 2)
    text = words(run, 1, -signal.SIGKILL, -signal.SIGTERM)
    assert "rank 1" in text.splitlines()[0] and "SIGKILL" in text and "memory" in text


def test_a_rank_that_left_silently_is_named(run: RunFolder) -> None:
    """User case pub_103."""
    fail(run, 0, RuntimeError(LOST))
    live(run, 1)
    text = words(run, 1, 0)
    assert "rank 1" in text.splitlines()[0] and "exit code 0 in the middle" in text


def test_a_rank_that_never_started_is_named(run: RunFolder) -> None:
    live(run, 0)
    assert "rank 1, before it reported" in words(run, -signal.SIGTERM, -signal.SIGSEGV)


def test_ranks_that_are_done_are_not_the_cause(run: RunFolder) -> None:
    live(run, 0, Phase.DONE)
    live(run, 1)
    cause = first_cause(rank_ends(run, [0, 0]))
    assert cause is not None and cause.rank == 1
    live(run, 1, Phase.DONE)
    assert first_cause(rank_ends(run, [0, 0])) is None


def test_if_all_lost_their_peers_the_first_to_notice_is_shown(run: RunFolder) -> None:
    fail(run, 1, RuntimeError(LOST))
    fail(run, 0, RuntimeError(LOST))
    cause = first_cause(rank_ends(run, [1, 1]))
    assert cause is not None and cause.rank == 1


def test_the_block_is_at_most_fifteen_lines_for_any_number_of_ranks(run: RunFolder) -> None:
    for rank in range(40):
        fail(run, rank, ValueError("\n".join(f"line {i}" for i in range(50))))
    block = last_words(run, rank_ends(run, [1] * 40), Path("checkpoints/step-1"))
    assert len(block.splitlines()) <= 15
    assert "35 more" in block and "checkpoints/step-1" in block


def test_bad_input_keeps_its_own_words(run: RunFolder) -> None:
    fail(run, 0, DataError("no text"))
    end = rank_ends(run, [1])[0]
    assert end.error is not None and end.error.is_input
    assert end.error.text == "- no text"


class DistBackendError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(LOST), True),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Read error [127.0.0.1]: Connection reset by peer"), True),
        (BrokenPipeError("x"), True),
        (DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_errors_of_lost_peers_are_told_from_others(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def test_a_status_file_tells_step_and_phase(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "status" / "rank-0")
    for step, phase in ((0, Phase.LOAD), (10**9, Phase.EVALUATE), (7, Phase.SAVE)):
        file.set(step, phase)
        assert read_status(tmp_path / "status" / "rank-0") == file.now
        assert (file.now.step, file.now.phase) == (step, phase)


def test_a_missing_or_torn_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path / "none") is None
    (tmp_path / "torn").write_text('{"pid": 1, "ho')
    assert read_status(tmp_path / "torn") is None


def test_a_new_launch_forgets_the_failures_of_the_last(run: RunFolder) -> None:
    fail(run, 0, ValueError("x"))
    run.clear_last_launch()
    assert rank_ends(run, [None]) == [RankEnd(rank=0, status=None, error=None, exit_code=None)]
