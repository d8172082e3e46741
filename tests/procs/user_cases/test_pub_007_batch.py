"""User case PUB-007: a batch that does not add up shows the whole equation, and what would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import losses
from verbs import Ranks, job, process, tree

from triptych.errors import PlanError
from triptych.plan.plan import Plan
from triptych.plan.toml import read_plan
from triptych.runtime.mesh import Mesh
from triptych.schedule.timeline import Timeline

FOUR = ("parallel.plan=tp=2", "parallel.ranks=4")


def batch(total: int, micro: int, accumulation: int | None = None) -> list[str]:
    words = [f"train.global_batch={total}", f"train.microbatch={micro}"]
    return [*words, *([f"train.accumulation={accumulation}"] if accumulation else [])]


def test_pub_007_four_ranks_of_torchrun_stop_with_the_equation_and_the_nearest_settings(
    tmp_path: Path,
) -> None:
    path = job(tmp_path)
    before = tree(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    train = ["-m", "triptych", "train", path, "--plan", "tp=2", "--set", *batch(30, 4)]
    ended = process(*torchrun, *train, folder=tmp_path)
    assert ended.code != 0
    for words in (
        "world=4, TP=2, PP=1, CP=1, DP=2: global batch 30 / (microbatch 4 x DP 2) = 3.75",
        "rule: global batch = microbatch x DP x accumulation, with DP = world / (TP x PP x CP)",
        "works: microbatch 3 | microbatch 5 | global batch 24 | global batch 32",
    ):
        assert ended.err.count(words) == 1, ended.err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("numbers", "equation", "works"),
    [
        ((8, 4, 3), "4 x DP 2 x accumulation 3 = 24, but the global batch is 8", (24, 1)),
        ((12, 3, 5), "3 x DP 2 x accumulation 5 = 30, but the global batch is 12", (30, 2)),
    ],
)
def test_pub_007_three_numbers_that_contradict_each_other_stop_before_the_model_is_built(
    ranks: Ranks,
    tmp_path: Path,
    numbers: tuple[int, int, int],
    equation: str,
    works: tuple[int, int],
) -> None:
    """Both nearest settings keep two of the three numbers."""
    path = job(tmp_path)
    before = tree(tmp_path)
    ended = ranks("train", path, "--set", *FOUR, *batch(*numbers))
    assert ended.code == 2 and tree(tmp_path) == before
    assert f"world=4, TP=2, PP=1, CP=1, DP=2: microbatch {equation}" in ended.problems
    assert f"works: global batch {works[0]} | accumulation {works[1]}" in ended.problems


def test_pub_007_a_script_that_is_alone_is_told_so_with_the_launch_command() -> None:
    """A script that makes the mesh of a plan itself."""
    with pytest.raises(PlanError) as caught:
        Mesh.create(Plan.uniform(4, tp=2, dp=2))
    text = str(caught.value)
    assert "only one process exists" in text and "TP=2 x PP=1 x CP=1 x DP=2 = 4" in text
    assert "torchrun --nproc-per-node=4" in text


def test_pub_007_accumulation_is_derived_from_global_batch_and_micro_batch(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Without accumulation in the job, the ranks run as many as it takes."""
    path = job(tmp_path)
    ranks.done("train", path, "--set", *FOUR, "train.steps=1", *batch(24, 4))
    run = tmp_path / "run"
    plan = read_plan(run / "plan.toml")
    assert (plan.world_size, plan.tp, plan.dp, plan.microbatch) == (4, 2, 2, 4)
    timeline = Timeline.from_json(json.loads((run / "timeline.json").read_text()))
    forwards = [span.label for span in timeline.spans if "F" in span.label]
    assert forwards == [f"0F{i}" for i in range(3)]
    assert list(losses(path)) == [1]
