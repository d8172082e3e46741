"""A bad job ends the command with code 2 and one message, quickly, with nothing written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import make_job

CASES = {
    "misspelt": ("[parallel]\ntensor_paralel = 2\n", ["tensor_paralel", "[parallel] plan"]),
    "wrong section": ("[parallel]\nlearning_rate = 1e-3\n", ["[optimizer] learning_rate"]),
    "float": ("[checkpoint]\nevery = 2.5\n", ["[checkpoint] every = 2.5", "valid integer"]),
    "duplicate": ("[optimizer]\neps = 1e-8\neps = 1e-9\n", ["line 24", "`eps = 1e-9`"]),
    "syntax": ("[optimizer]\n  eps: 1e-8\n", ["line 23, column 6"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_in_under_three_seconds_with_code_2(tmp_path: Path, case: str) -> None:
    """User case pub_020."""
    path = make_job(tmp_path)
    more, words = CASES[case]
    path.write_text(path.read_text() + more)
    before = sorted(tmp_path.rglob("*"))
    spent_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "train", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - spent_s < 3
