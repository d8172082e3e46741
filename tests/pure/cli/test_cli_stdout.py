"""The answer's way out: a full disk is told in one message, a reader that leaves early is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "triptych", "schedule", "1f1b", "--stages=8", "--microbatches=512"]


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_an_answer_that_cannot_be_written_is_one_message(more: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, *more], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "error:\ncannot write the answer: No space left on device\n"


def test_a_reader_may_leave_early() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(6) == b"rank 0"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
