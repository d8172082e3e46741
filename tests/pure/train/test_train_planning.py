"""Which plan a job gets: its own or the search's; ranks, precision, batch; one list of problems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from job_samples import write_job

from triptych.cluster.cluster import Cluster
from triptych.errors import InputError, JobError, PlanError
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml
from triptych.plan.workload import Workload
from triptych.train.environment import Place
from triptych.train.job_file import read_job
from triptych.train.planning import Choice, Found, choose_plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
MODEL = from_config(CONFIG, "tiny")


class Plans:
    """A planner that finds the fastest of the plans it was given that keeps what is fixed."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = plans
        self.fixed: list[Mapping[str, str]] = []
        self.clusters: list[Cluster] = []

    def search(
        self, model: Model, cluster: Cluster, workload: Workload, fixed: Mapping[str, str]
    ) -> Found:
        self.fixed.append(fixed)
        self.clusters.append(cluster)
        for time_s, plan in enumerate(self.plans):
            if all(fixed.get(k, str(getattr(plan, k))) == str(getattr(plan, k)) for k in PINS):
                return Found(plan=plan, step_time_s=time_s, document={"time": time_s})
        raise PlanError(f"nothing with {dict(fixed)}")

    def price(
        self, model: Model, cluster: Cluster, workload: Workload, plan: Plan
    ) -> Mapping[str, Any]:
        return {}


PINS = ("dp", "tp", "microbatch")


def launched(world: int, local: int | None = None) -> Place:
    return Place(
        rank=0,
        world_size=world,
        local_rank=0,
        local_world_size=local or world,
        address="x",
        port=1,
        launcher="torchrun",
    )


@pytest.fixture
def job_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return write_job(tmp_path)


def choose(
    path: Path, *overrides: str, place: Place | None = None, planner: Plans | None = None
) -> Choice:
    return choose_plan(read_job(path, overrides), MODEL, place, planner or Plans())


def test_a_short_form_runs_on_as_many_ranks_as_its_degrees(job_path: Path) -> None:
    choice = choose(job_path, "parallel.plan=tp=2,pp=2")
    assert choice.plan.world_size == choice.cluster.num_devices == 4
    assert choice.plan.precision.parameter == "fp32"
    assert choice.search is None


def test_ranks_that_are_asked_for_set_the_data_degree(job_path: Path) -> None:
    assert choose(job_path, "parallel.plan=tp=2", "parallel.ranks=4").plan.dp == 2


def test_the_ranks_of_a_launch_set_the_data_degree(job_path: Path) -> None:
    assert choose(job_path, "parallel.plan=tp=2", place=launched(8)).plan.dp == 4


def test_a_launch_over_nodes_is_a_cluster_of_nodes(job_path: Path) -> None:
    cluster = choose(job_path, "parallel.plan=tp=2", place=launched(8, 4)).cluster
    assert (cluster.groups[0].nodes, cluster.groups[0].devices_per_node) == (2, 4)


def test_one_process_for_a_plan_of_four_is_told_the_launch_command(job_path: Path) -> None:
    """User case pub_007."""
    with pytest.raises(InputError) as caught:
        choose(job_path, "parallel.plan=tp=2,pp=2,dp=1", place=launched(1))
    text = str(caught.value)
    assert "only one process exists" in text and "torchrun --nproc-per-node=4" in text


def test_a_plan_file_is_run_as_it_says(job_path: Path, tmp_path: Path) -> None:
    plan = Plan.uniform(4, pp=2, layers=(3, 1), microbatch=2)
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert choose(job_path, f"parallel.plan={tmp_path / 'plan.toml'}").plan == plan


def test_ranks_that_differ_from_the_plan_are_refused(job_path: Path) -> None:
    with pytest.raises(JobError, match="ranks = 3, but the plan has TP=2"):
        choose(job_path, "parallel.plan=tp=2,dp=1", "parallel.ranks=3")


def test_batch_and_head_problems_are_told_together(job_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        choose(job_path, "parallel.plan=tp=3,dp=3", "train.microbatch=3")
    text = str(caught.value)
    assert "2 KV heads" in text and "global batch 8 / (microbatch 3 x DP 3)" in text
    assert len([p for p in caught.value.problems if "micro-batches" in p.what]) == 1


def test_a_plan_that_cannot_run_today_is_refused_with_the_reason(job_path: Path) -> None:
    with pytest.raises(PlanError):
        choose(job_path, "parallel.plan=dp=2,offload=parameters")


def test_the_precision_of_the_job_is_that_of_the_plan(job_path: Path) -> None:
    precision = choose(job_path, "parallel.plan=dp=2", "parallel.precision=bf16").plan.precision
    assert (precision.parameter, precision.master, precision.moments) == ("bf16", "fp32", "fp32")


def test_job_and_plan_with_different_precisions_are_refused(job_path: Path) -> None:
    with pytest.raises(JobError, match="precision"):
        choose(job_path, "parallel.plan=dp=2,precision=fp32", "parallel.precision=bf16")


def test_the_plan_of_the_search_is_taken(job_path: Path) -> None:
    best = Plan.uniform(4, dp=2)
    choice = choose(job_path, planner=Plans(best))
    assert choice.plan == best and choice.search == {"time": 0}


def test_the_search_keeps_what_the_job_fixes(job_path: Path) -> None:
    planner = Plans(Plan.uniform(4, dp=2, microbatch=2))
    choose(
        job_path,
        "parallel.fix={tp = 1, sp = 0}",
        "train.microbatch=2",
        "parallel.precision=bf16",
        "parallel.ranks=2",
        planner=planner,
    )
    (fixed,) = planner.fixed
    assert fixed["tp"] == "1" and fixed["microbatch"] == "2"
    assert fixed["precision"] == "bf16" and "sequence_parallel" in fixed
    assert planner.clusters[0].num_devices == 2


def test_accumulation_is_kept_by_the_best_plan_over_all_data_degrees(job_path: Path) -> None:
    plans = [
        Plan.uniform(4, dp=2, microbatch=1),  # 4 micro-batches of the 8 sequences
        Plan.uniform(4, dp=2, tp=2, microbatch=2),  # 2
        Plan.uniform(4, tp=4, microbatch=4),  # 2
    ]
    planner = Plans(*plans)
    choice = choose(job_path, "train.accumulation=2", "parallel.ranks=4", planner=planner)
    assert choice.plan == plans[1] and choice.search == {"time": 1}
    assert [(f["dp"], f["microbatch"]) for f in planner.fixed] == [
        ("1", "4"),
        ("2", "2"),
        ("4", "1"),
    ]


@pytest.mark.parametrize("micro", [(), ("train.microbatch=3",)])
def test_an_accumulation_that_leaves_nothing_is_refused(
    job_path: Path, micro: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError, match="accumulation = 3 with global_batch = 8"):
        choose(job_path, "train.accumulation=3", *micro, planner=Plans(Plan.uniform(4)))


def test_an_unknown_setting_in_fix_is_refused(job_path: Path) -> None:
    with pytest.raises(PlanError, match="tensor"):
        choose(job_path, "parallel.fix={tensor = 2}", planner=Plans(Plan.uniform(4)))


def test_a_capacity_keeps_sequences_whole_in_the_search(job_path: Path) -> None:
    sparse = from_config({**CONFIG, "model_type": "mixtral", "num_local_experts": 4}, "sparse")
    planner = Plans(Plan.uniform(4, dp=2))
    job = read_job(job_path, ("moe.capacity_factor=1.5", "parallel.ranks=2"))
    assert choose_plan(job, sparse, None, planner).plan.dp == 2
    assert planner.fixed[0]["cp"] == "1"
    with pytest.raises(PlanError) as caught:
        choose_plan(job, MODEL, None, planner)
    assert "no [moe] section" in str(caught.value)
