"""User case PUB-020: what is misspelt in a plan or cluster file is named, never ignored.

Job files have tests of their own (`tests/procs/train/test_train_bad_jobs.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import WITHOUT_TORCH
from verbs import Ranks, job, process, tree

from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import write_cluster
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml

PLANS = {
    "misspelt": ("tp = 2", "tensor_paralel = 2", ["'tensor_paralel'", "plan.toml", "works: tp"]),
    "other tool's": ("microbatch = 1", "batch_size = 1", ["'batch_size'", "microbatch"]),
    "in a section": ("[precision]", "[precision]\nzero = 1", ["'zero'", "[precision]"]),
    "float": ("microbatch = 1", "microbatch = 1.5", ["microbatch = 1.5", "whole number"]),
    "duplicate": ("tp = 2", "tp = 2\ntp = 4", ["plan.toml", "line", "column"]),
    "syntax": ("tp = 2", "  tp: 2", ["plan.toml", "line", "column"]),
}
CLUSTERS = {
    "misspelt": ("nodes = 1", "node = 1", ["'node'", "nodes"]),
    "float": ("nodes = 1", "nodes = 1.5", ["nodes = 1.5"]),
    "duplicate": ("nodes = 1", "nodes = 1\nnodes = 2", ["line", "column"]),
    "syntax": ("nodes = 1", "nodes: 1", ["line", "column"]),
}


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize("case", PLANS)
def test_pub_020_a_broken_plan_file_stops_training_with_its_key_or_place(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    path = job(tmp_path)
    old, new, words = PLANS[case]
    plan = tmp_path / "plan.toml"
    plan.write_text(changed(plan_toml(Plan.uniform(4, tp=2)), old, new))
    before = tree(tmp_path)
    ended = ranks("train", path, "--plan", plan)
    assert ended.code == 2 and tree(tmp_path) == before
    assert all(word in ended.problems for word in words), ended.problems


@pytest.mark.parametrize("case", CLUSTERS)
def test_pub_020_a_broken_cluster_file_stops_planning_with_its_key_or_place(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    old, new, words = CLUSTERS[case]
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(changed(write_cluster(parse_cluster("1x2xcpu")), old, new))
    before = tree(tmp_path)
    ended = ranks("plan", "llama-3.1-8b", "--cluster", cluster)
    assert ended.code == 2 and tree(tmp_path) == before
    assert all(word in ended.problems for word in words), ended.problems


def test_pub_020_a_broken_plan_file_stops_before_torch_is_imported(tmp_path: Path) -> None:
    """From the command line: in a second, not in ten."""
    path = job(tmp_path)
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_toml(Plan.uniform(4, tp=2)).replace("microbatch", "microbach"))
    ended = process("-c", WITHOUT_TORCH, "train", path, "--plan", plan, folder=tmp_path)
    assert ended.code == 2 and "microbatch" in ended.problems
