"""kill -9 of a random rank at a random moment: the run goes on by itself, to the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kill_cycles import Cycles


@pytest.mark.timeout(900)  # some thirty starts of two ranks
def test_ten_runs_with_a_killed_rank_end_in_the_bits_of_the_unbroken_run(tmp_path: Path) -> None:
    """`benchmarks/killed_ranks.py` does it a hundred times."""
    cycles, chance = Cycles(tmp_path / "run", "dp=2,zero=1"), random.Random(5)
    killed = []
    while len(killed) < 10:
        found = cycles.cycle(chance)
        assert found.is_equal
        killed += [found] if found.kill else []
    assert all(found.restarts >= 1 for found in killed)
