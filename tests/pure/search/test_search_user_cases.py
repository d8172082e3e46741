"""Public user cases of planning: what people met with other planners, as behaviour.

PUB-003 and 007 have more tests in `tests/pure/cli` and `tests/procs/user_cases`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_samples import gpus, tiny, with_memory, work

from triptych.cli.main import run
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict
from triptych.errors import PlanError
from triptych.model.model import Experts, Model
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload
from triptych.search.search import SearchResult, search


def without_time(result: SearchResult) -> dict[str, Any]:
    return result.to_json() | {"search_time_s": 0}


# --- PUB-003: nothing found, and no reason -----------------------------------------------------


def test_pub_003_counts_the_least_bad_plan_and_changes_that_fit() -> None:
    cluster = with_memory(gpus(1, 2), 1.85e9)
    fixed = {"microbatch": "4", "recompute": "none", "zero": "0", "schedule": "1f1b"}
    result = search(tiny(), cluster, work(8, 2048), fixed=fixed)
    assert result.plans == () and result.rejected["memory"] == result.legal
    near = result.closest
    assert near is not None and near.over_bytes == near.needed_bytes - int(1.85e9)
    words = " | ".join(near.changes)
    assert "without" in words and "recompute=full" in words
    assert "devices instead of 2" in words or "sequences of" in words
    enough = with_memory(cluster, near.needed_bytes)
    assert search(tiny(), enough, work(8, 2048), fixed=fixed).plans


def test_pub_003_unsupported_pins_are_counted_by_reason() -> None:
    result = search(tiny(kv_heads=3, heads=6), gpus(1, 4), work(6))
    reasons = {why: count for why, count in result.rejected.items() if why != "memory"}
    assert any("heads" in why for why in reasons) and any("batch" in why for why in reasons)
    assert result.candidates == result.legal + sum(reasons.values())


# --- PUB-006: the time of a search explodes with depth -----------------------------------------

SCRIPT = r"""
import json, re
from pathlib import Path
from search_samples import tiny
from triptych.cluster.text import parse_cluster
from triptych.model.model import Experts
from triptych.plan.workload import Workload
from triptych.search.search import search
experts = Experts(count=64, top_k=6, width=1408)
shape = dict(hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=128256)
deep = tiny(layers=96, width=14336, **shape), "512x8xH100-SXM", 4096
mixed = tiny(layers=60, experts=experts, **shape), "4x8xH100-SXM+4x8xA100-80", 512
for model, cluster, batch in (deep, mixed):
    work = Workload(sequence_length=4096, global_batch=batch)
    result = search(model, parse_cluster(cluster), work, top=1)
    print(json.dumps([result.legal, result.simulated]))
peak_kb = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
print(int(peak_kb) // 1024)
"""


def test_pub_006_of_deep_models_on_many_devices_few_plans_are_simulated() -> None:
    """The rest is judged by closed forms: seconds, not hours."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        cwd=__file__.rsplit("/", 1)[0],
    )
    *searches, rss_mb = map(json.loads, run.stdout.splitlines())
    for legal, simulated in searches:
        assert legal > 100_000 and simulated < 100
    assert len(searches) == 2 and rss_mb < 500


def test_pub_006_the_same_question_has_the_same_answer_and_its_counts() -> None:
    first, second = (search(tiny(), gpus(2, 2), work(), with_front=True) for _ in range(2))
    assert without_time(first) == without_time(second)
    assert first.search_time_s > 0 and first.legal == first.simulated + sum(first.bounds.values())


# --- PUB-007: the batch equation ---------------------------------------------------------------


@pytest.mark.parametrize("batch", [30, 14])
def test_pub_007_the_equation_is_shown_with_the_data_degree_and_what_works(batch: int) -> None:
    fixed = {"tp": "2", "microbatch": "4", "pp": "1"}
    with pytest.raises(PlanError) as caught:
        search(tiny(), gpus(1, 4), work(batch), fixed=fixed)
    (problem,) = caught.value.problems
    for word in ("world=4", "TP=2", "DP=2", f"{batch} / (microbatch 4 x DP 2)"):
        assert word in problem.what
    offered = [int(text) for text in re.findall(r"microbatch (\d+)", problem.works)]
    assert len(offered) == 2
    for size in offered:
        works = search(tiny(), gpus(1, 4), work(batch), fixed=fixed | {"microbatch": str(size)})
        assert works.plans


# --- PUB-008: why this layout, and what is not modelled ----------------------------------------

DENSE, MIXTURE = tiny(), tiny(experts=Experts(count=4, top_k=2, width=96))


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_pub_008_the_first_three_have_terms_memory_and_the_deciding_difference(
    model: Model,
) -> None:
    document = search(model, gpus(2, 4), work(16), top=3).to_json()
    assert len(document["plans"]) == 3 and document["binding"]
    best = document["plans"][0]
    assert best["behind"] is None
    for plan in document["plans"]:
        assert sum(plan["time_s"].values()) == pytest.approx(plan["step_time_s"], rel=1e-6)
        assert sum(plan["memory_gib"].values()) == pytest.approx(plan["peak_memory_gib"])
    for plan in document["plans"][1:]:
        behind = plan["behind"]
        assert behind["step_time_s"] == plan["step_time_s"] - best["step_time_s"]
        term = behind["term"]
        assert behind["term_s"] == plan["time_s"][term] - best["time_s"][term]


def test_pub_008_experts_are_planned_with_expert_parallelism() -> None:
    plans = search(MIXTURE, gpus(1, 4), work(16), top=20).plans
    assert {candidate.plan.ep for candidate in plans} >= {1, 2, 4}


def test_pub_008_what_cannot_be_priced_is_said_and_not_guessed() -> None:
    strange = replace(tiny(), unreliable=("attention variant 'spiral' is priced as plain",))
    result = search(strange, gpus(1, 2), work(), top=1)
    assert result.plans[0].prediction.assumptions["model"] == strange.unreliable
    moved = search(tiny(), gpus(1, 2), work(), fixed={"offload": "optimizer"}, top=1).plans[0]
    assert any("is not counted" in text for text in moved.prediction.assumptions["compute"])


def test_pub_008_an_unknown_architecture_is_named_in_the_answer_and_its_plan_is_marked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {"model_type": "spiralformer"}))
    args = ["plan", str(path), "--cluster", "1x2xH100-SXM", "--seq", "64", "--batch", "4"]
    assert run([*args, "--top", "1"]) == 0
    text = capfd.readouterr().out
    assert "unreliable: model_type 'spiralformer' is not known" in text
    assert "priced, not runnable" in text and "no plan that fits runs today" in text
    assert run([*args, "--fix", "attention=spiral"]) == 2
    said = capfd.readouterr().err
    assert "'spiral'" in said and "one of sdpa, eager, flash" in said


def test_pub_008_a_layout_of_the_user_has_its_terms_and_its_difference_to_the_best(
    capfd: pytest.CaptureFixture[str],
) -> None:
    args = ["plan", "llama-3.2-1b", "--cluster", "1x4xH100-SXM", "--seq", "1024", "--batch", "16"]
    assert run([*args, "--fix", "tp=4,pp=1,zero=0", "--top", "1", "--json"]) == 0
    named = json.loads(capfd.readouterr().out)["plans"][0]
    assert run([*args, "--top", "1", "--json"]) == 0
    best = json.loads(capfd.readouterr().out)["plans"][0]
    assert named["plan"]["tp"] == 4 and named["reason"] and named["time_s"] and named["memory_gib"]
    assert best["step_time_s"] <= named["step_time_s"]


def test_pub_008_what_is_priced_but_does_not_run_is_marked() -> None:
    result = search(tiny(), gpus(1, 2), work(), fixed={"attention": "flash"}, top=2)
    for candidate in result.plans:
        assert not candidate.prediction.runnable
        assert "priced, not runnable" in candidate.reason
    assert result.runnable is None


# --- PUB-010 to 012: memory by stage of ZeRO, by data ranks, by term ---------------------------


def memory(model: Model, cluster: Cluster, workload: Workload, **settings: Any) -> Any:
    plan = Plan.uniform(model.num_layers, **settings)
    return predict(model, cluster, workload, plan).memory_gib


@pytest.mark.parametrize("precision", [Precision(), Precision.mixed()], ids=["fp32", "mixed"])
@pytest.mark.parametrize("data", [1, 2, 4])
def test_pub_010_each_stage_of_zero_divides_one_more_term(data: int, precision: Precision) -> None:
    asked = tiny(), gpus(1, data), work(8)
    whole, *zeros = (
        memory(*asked, dp=data, zero=zero, precision=precision) for zero in (0, 1, 2, 3)
    )
    divided = [("optimizer",), ("optimizer", "gradients"), ("optimizer", "gradients", "weights")]
    for terms, names in zip(zeros, divided, strict=True):
        for name in ("weights", "gradients", "optimizer"):
            share = data if name in names else 1
            assert terms[name] == pytest.approx(whole[name] / share, rel=1e-9)


def test_pub_011_what_does_not_shrink_with_more_data_ranks_is_a_term_of_its_own() -> None:
    model = tiny(vocab=20_000)
    two, four = (
        memory(model, gpus(1, data), work(8), dp=data, zero=3, precision=Precision.mixed())
        for data in (2, 4)
    )
    for name in ("weights", "gradients", "optimizer"):
        assert four[name] == pytest.approx(two[name] / 2, rel=0.05)
    assert four["activations"] == two["activations"] and four["logits"] == two["logits"]


@pytest.mark.parametrize(
    ("model", "length", "main"),
    [
        (tiny(hidden=64, heads=8, head_dim=8, vocab=131_072, layers=4), 512, "logits"),
        (tiny(hidden=256, head_dim=32, layers=8, width=688), 4096, "activations"),
    ],
)
def test_pub_012_a_peak_has_logits_activations_and_buckets_in_it(
    model: Model, length: int, main: str
) -> None:
    asked = model, gpus(1, 1), work(4, length)
    terms = memory(*asked, microbatch=4, precision=Precision.mixed())
    assert set(terms) >= {"logits", "activations", "buffers", "overhead"}
    state = ("weights", "gradients", "optimizer", "overhead")
    rest = {name: size for name, size in terms.items() if name not in state}
    assert max(rest, key=rest.__getitem__) == main
    again = memory(*asked, microbatch=4, recompute="full", precision=Precision.mixed())
    assert (again["activations"] < terms["activations"]) and again["logits"] == terms["logits"]


def test_a_mixed_cluster_runs_at_the_pace_of_its_slowest_device() -> None:
    where = parse_cluster("1x8xH100-SXM+1x8xA100-80")
    result = search(tiny(), where, work(16), top=1)
    texts = result.plans[0].prediction.assumptions["compute"]
    assert "a stage runs at the pace of the slowest of its own devices" in texts
