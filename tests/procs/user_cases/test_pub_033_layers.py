"""User case PUB-033: a depth that does not divide by the stages loses no layer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from logits import logits
from tiny_runs import losses
from verbs import Ranks, job, tree

from triptych.model.count import parameters
from triptych.model.load import load_model
from triptych.plan.plan import Plan, Precision

FP32 = Precision(parameter="fp32")
STAGE = re.compile(r"stage (\d+): layers? (\d+)(?:-(\d+))?, .* parameters \((\d+)\)")


def stages(text: str) -> list[tuple[int, int, int]]:
    """First and last layer and parameters of each stage, as the run says at its start."""
    rows = [(int(a), int(b or a), int(count)) for _, a, b, count in STAGE.findall(text)]
    assert rows, text
    return rows


@pytest.mark.parametrize(("layers", "pp"), [(10, 3), (10, 4), (7, 2)])
def test_the_run_says_the_layers_of_each_stage_and_they_are_all_of_the_model(
    ranks: Ranks, tmp_path: Path, layers: int, pp: int
) -> None:
    """User case PUB-033: gradients are compared in the runtime's tests."""
    path = job(tmp_path, num_hidden_layers=layers)
    ended = ranks.done("train", path, "--plan", f"pp={pp}", "--set", "train.steps=1")
    rows = stages(ended.err)
    held = [layer for first, last, _ in rows for layer in range(first, last + 1)]
    assert len(rows) == pp and held == list(range(layers))
    total = parameters(load_model(str(tmp_path / "run")))
    assert sum(count for *_, count in rows) == total
    assert re.search(rf"all stages: {layers} layers, .* \({total}\)", ended.err)
    ids = [1, 250, 33, 8]
    expected = logits(tmp_path / "run", Plan.uniform(layers, precision=FP32), ids)
    found = logits(tmp_path / "run", Plan.uniform(layers, pp=pp, precision=FP32), ids)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_more_stages_than_layers_are_refused_with_the_depths_that_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    """User case PUB-033: 3 layers on 4 stages."""
    path = job(tmp_path, num_hidden_layers=3)
    before = tree(tmp_path)
    ended = ranks("train", path, "--plan", "pp=4")
    assert ended.code == 2 and tree(tmp_path) == before
    assert "has 3 layers" in ended.problems and "in 1, 2, 3" in ended.problems


def test_ten_layers_in_two_chunks_on_two_ranks_are_all_there_or_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    """User case PUB-033: interleaved."""
    path = job(tmp_path, num_hidden_layers=10)
    short = ("--set", "train.steps=1", "train.global_batch=4")
    ended = ranks("train", path, "--plan", "pp=2,chunks=2,schedule=interleaved", *short)
    if ended.code == 0:
        rows = stages(ended.err)
        held = [layer for first, last, _ in rows for layer in range(first, last + 1)]
        assert sorted(held) == list(range(10))
        found = losses(path)
        (tmp_path / "run").rename(tmp_path / "interleaved")
        ranks.done("train", path, "--plan", "dp=1", *short)
        assert found == pytest.approx(losses(path), abs=1e-5)
    else:
        assert ended.code == 2 and "rule: " in ended.problems
        assert not (tmp_path / "run").exists()
