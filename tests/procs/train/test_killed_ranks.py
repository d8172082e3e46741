"""kill -9 of a random rank at a random moment: the run goes on by itself, to the same bits."""

from __future__ import annotations

import random

import pytest
from kill_cycles import Cycles


@pytest.fixture(scope="module")
def cycles(tmp_path_factory: pytest.TempPathFactory) -> Cycles:
    """The unbroken run of two ranks, to be run again and again."""
    return Cycles(tmp_path_factory.mktemp("cycles") / "run", "dp=2,zero=1")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(10))
def test_a_run_with_a_killed_rank_ends_in_the_bits_of_the_unbroken_run(
    cycles: Cycles, seed: int
) -> None:
    """`benchmarks/killed_ranks.py` does it a hundred times."""
    chance = random.Random(seed)
    found = cycles.cycle(chance)
    while not found.kill:  # the run was over before
        assert found.is_equal
        found = cycles.cycle(chance)
    assert found.is_equal and found.restarts >= 1
