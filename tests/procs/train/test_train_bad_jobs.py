"""A bad job ends the command with code 2 and one message, before torch, with nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import WITHOUT_TORCH, make_job

CASES = {
    "misspelt": ("[parallel]\ntensor_paralel = 2\n", ["tensor_paralel", "[parallel] plan"]),
    "wrong section": ("[parallel]\nlearning_rate = 1e-3\n", ["[optimizer] learning_rate"]),
    "float": ("[checkpoint]\nevery = 2.5\n", ["[checkpoint] every = 2.5", "valid integer"]),
    "duplicate": ("[optimizer]\neps = 1e-8\neps = 1e-9\n", ["line 24", "`eps = 1e-9`"]),
    "syntax": ("[optimizer]\n  eps: 1e-8\n", ["line 23, column 6"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_ends_with_code_2_before_torch_is_imported(tmp_path: Path, case: str) -> None:
    """User case pub_020."""
    path = make_job(tmp_path)
    more, words = CASES[case]
    path.write_text(path.read_text() + more)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
