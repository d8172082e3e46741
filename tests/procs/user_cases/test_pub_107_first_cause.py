"""User case PUB-107: the last lines are about the first failure, also of a rank that only hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faulty_entries as faulty
import pytest
from verbs import Ranks, entry_of_ranks, job

from triptych.train.result import Summary

TRAIN = (
    *("--plan", "dp=4", "--set", "train.steps=6", "parallel.timeout_s=4"),
    "checkpoint.asynchronous=false",
)
WAYS: dict[str, tuple[Callable[[str], Summary], str, list[str]]] = {
    "data": (faulty.hangs_in_data, "data", ["hung", "wait_forever", "stack-rank-2.txt"]),
    "stopped": (faulty.is_stopped, "forward/backward", ["hung", "nor did it answer"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_pub_107_a_rank_that_hangs_is_named_and_the_others_keep_their_errors_in_files(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    entry, phase, words = WAYS[way]
    entry_of_ranks(monkeypatch, entry)
    ended = ranks("train", job(tmp_path), *TRAIN)
    lines = ended.problems.splitlines()[1:]
    assert ended.code == 1 and len(lines) <= 15
    assert lines[0].startswith("training failed: rank 2, host "), ended.problems
    assert f"step 3, phase {phase}" in lines[0]
    assert all(word in ended.problems for word in words), ended.problems
    assert "rank-0.txt, rank-1.txt, rank-3.txt" in ended.problems


def test_pub_107_a_run_starts_its_ranks_again_and_says_why(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt fails in its third step, and each is two checkpoints further."""
    entry_of_ranks(monkeypatch, faulty.raises_in_forward)
    settings = ("train.microbatch=1", "checkpoint.every=1", "parallel.restarts=2")
    ended = ranks.done("train", job(tmp_path), *TRAIN, *settings)
    assert ended.err.count("the attempt before it failed: rank 2, host ") == 2
    assert f"ValueError: {faulty.TEXT}" in ended.err
    kept = tmp_path / "run" / "attempts" / "0" / "errors" / "rank-2.txt"
    assert faulty.TEXT in kept.read_text()


def test_pub_107_a_slow_rank_is_named_before_the_first_step(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_of_ranks(monkeypatch, faulty.is_slow)
    ended = ranks.done("train", job(tmp_path), *TRAIN, "train.steps=1")
    (warning,) = [x for x in ended.err.splitlines() if "warning: rank" in x and "is slow" in x]
    assert "warning: rank 2 on " in warning
    for words in ("pre-flight: matrix product", "ring ", "a checkpoint needs", "settings: "):
        assert words in ended.err
