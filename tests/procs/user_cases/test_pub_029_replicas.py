"""User case PUB-029: replicated parameters stay bitwise equal, and a run can be told to check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faulty_entries import has_a_flipped_bit
from layouts import Run, assert_equal_runs, merge, tiny_config, train
from ranks import run_ranks
from tiny_runs import losses
from verbs import Ranks, entry_of_ranks, job

from triptych.checkpoint.find import newest_complete
from triptych.plan.plan import Plan

BIASES = {"attention_bias": True, "mlp_bias": True}
CHECKS = (
    *("--set", "train.check_replicas_every=1", "checkpoint.every=1"),
    "train.microbatch=4",
)


@pytest.mark.parametrize("tp", [2, 4])
def test_pub_029_ten_steps_with_sequence_parallelism_equal_one_process(tp: int) -> None:
    """Norms and the biases of row-parallel layers among all parameters."""
    config = tiny_config(**BIASES)

    def body(plan: Plan) -> Run:
        return train(plan, config, steps=10, eps=1e-2)

    plan = Plan.uniform(4, tp=tp, sequence_parallel=True, microbatch=2)
    ours = merge(run_ranks(tp, body, plan))  # holders of the same elements hold the same bits
    assert_equal_runs(ours, merge(run_ranks(1, body, Plan.uniform(4, microbatch=2))), 1e-5)


def test_pub_029_verify_reports_that_replicas_are_equal(ranks: Ranks, tmp_path: Path) -> None:
    """The verb that compares a layout with one process."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config(**BIASES)))
    ended = ranks.done("verify", config, "--plan", "tp=2,sp=1", "--seq", "16", "--steps", "2")
    assert "replicas    bitwise equal" in ended.out and "the same as one process" in ended.out


def test_pub_029_a_run_that_checks_its_replicas_says_that_they_are_equal(
    ranks: Ranks, tmp_path: Path
) -> None:
    """After each step."""
    path = job(tmp_path, **BIASES)
    ended = ranks.done("train", path, "--plan", "tp=2,sp=1", *CHECKS)
    for step in range(1, 5):
        assert f"step {step}: all replicas are bitwise equal" in ended.err


def test_pub_029_a_run_that_checks_its_replicas_names_the_parameter_with_other_bits_on_a_rank(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is saved."""
    path = job(tmp_path)
    entry_of_ranks(monkeypatch, has_a_flipped_bit)
    ended = ranks("train", path, "--plan", "tp=2,dp=2,sp=1", *CHECKS)
    assert ended.code == 1
    assert "step 3: copies of 1 parameters differ over the ranks" in ended.err
    assert "model.norm.weight: ranks [0, 1, 3] differ from ranks [2]" in ended.err
    newest, _ = newest_complete(tmp_path / "run")
    assert newest is not None and newest.name == "step-00000002"
    assert max(losses(path)) == 3
