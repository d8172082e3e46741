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
STAGE = re.compile(r"(?:stage|pipeline rank) \d+: layers? ([\d, -]+), \S+ parameters \((\d+)\)")


def stages(text: str) -> list[tuple[list[int], int]]:
    """Layers and parameters of each pipeline rank, as the run says at its start."""
    rows = [(layers_of(words), int(count)) for words, count in STAGE.findall(text)]
    assert rows, text
    return rows


def layers_of(words: str) -> list[int]:
    """`0-2, 6` -> `[0, 1, 2, 6]`."""
    ends = [word.split("-") for word in words.split(", ")]
    return [layer for end in ends for layer in range(int(end[0]), int(end[-1]) + 1)]


def require_whole(text: str, run: Path, layers: int) -> None:
    """Every layer and every parameter of the model is said to be somewhere once."""
    rows = stages(text)
    assert sorted(layer for held, _ in rows for layer in held) == list(range(layers))
    total = parameters(load_model(str(run)))
    assert sum(count for _, count in rows) == total
    assert re.search(rf"all stages: {layers} layers, .* \({total}\)", text)


@pytest.mark.parametrize(("layers", "pp"), [(10, 3), (10, 4), (7, 2)])
def test_pub_033_the_run_says_the_layers_of_each_stage_and_they_are_all_of_the_model(
    ranks: Ranks, tmp_path: Path, layers: int, pp: int
) -> None:
    """Gradients are compared in the runtime's tests."""
    path, plan = (
        job(tmp_path, num_hidden_layers=layers),
        Plan.uniform(layers, pp=pp, precision=FP32),
    )
    short = ("--set", "train.steps=1", "train.microbatch=2")
    ended = ranks.done("train", path, "--plan", f"pp={pp}", *short)
    require_whole(ended.err, tmp_path / "run", layers)
    assert [held[0] for held, _ in stages(ended.err)] == [s.start for s in plan.stages]
    ids = [1, 250, 33, 8]
    expected = logits(tmp_path / "run", Plan.uniform(layers, precision=FP32), ids)
    found = logits(tmp_path / "run", plan, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_pub_033_more_stages_than_layers_are_refused_with_the_depths_that_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    """3 layers on 4 stages."""
    path = job(tmp_path, num_hidden_layers=3)
    before = tree(tmp_path)
    ended = ranks("train", path, "--plan", "pp=4")
    assert ended.code == 2 and tree(tmp_path) == before
    assert "has 3 layers" in ended.problems and "in 1, 2, 3" in ended.problems


def test_pub_033_ten_layers_in_two_chunks_on_two_ranks_are_all_there(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Interleaved: four uneven stages, two on each rank."""
    path = job(tmp_path, num_hidden_layers=10)
    short = ("--set", "train.steps=1", "train.global_batch=4")
    ended = ranks.done("train", path, "--plan", "pp=2,chunks=2,schedule=interleaved", *short)
    require_whole(ended.err, tmp_path / "run", 10)
    assert [len(held) for held, _ in stages(ended.err)] == [5, 5]
    found = losses(path)
    (tmp_path / "run").rename(tmp_path / "interleaved")
    ranks.done("train", path, "--plan", "dp=1", *short)
    assert found == pytest.approx(losses(path), abs=1e-5)
