"""What a search promises: pins, order, counts, reasons, and help when nothing fits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from search_samples import cpus, gpus, tiny, with_memory, work

from triptych.cluster.text import parse_cluster
from triptych.cost.uncertainty import MEMORY_SPARE
from triptych.errors import InputError, PlanError
from triptych.model.load import load_model
from triptych.model.model import Model
from triptych.plan import rules
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.workload import Workload
from triptych.search.objective import Objective
from triptych.search.search import SearchResult, search


def document(result: SearchResult) -> dict[str, Any]:
    """The JSON document without the only field that may differ between two searches."""
    return result.to_json() | {"search_time_s": 0}


# --- order and counts --------------------------------------------------------------------------


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (search(tiny(), gpus(1, 4), work()) for _ in range(2))
    assert json.dumps(document(first)) == json.dumps(document(second))


def test_plans_are_legal_fit_and_come_fastest_first() -> None:
    model, cluster = tiny(), gpus(2, 4)
    result = search(model, cluster, work(16), top=6)
    times = [candidate.prediction.step_time_s for candidate in result.plans]
    assert times == sorted(times)
    for candidate in result.plans:
        assert candidate.prediction.fits
        assert verify(candidate.plan, model, cluster, work(16)) == []


def test_plans_are_the_best_of_different_degrees() -> None:
    plans = [candidate.plan for candidate in search(tiny(), gpus(1, 4), work(), top=5).plans]
    assert len({(plan.tp, plan.pp, plan.dp) for plan in plans}) == 5


def test_next_best_plans_fill_up_when_degrees_are_fixed() -> None:
    result = search(tiny(), gpus(1, 4), work(), fixed={"tp": "2", "pp": "2"}, top=5)
    assert len(result.plans) == 5
    assert len({candidate.plan.short() for candidate in result.plans}) == 5


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        (tiny(), gpus(2, 4), 16),
        (tiny(layers=3, kv_heads=2), gpus(1, 8), 12),
        (tiny(vocab=50_000), gpus(1, 4, memory_bytes=1.9e9), 8),
        (tiny(), cpus(6), 9),
    ],
)
def test_what_became_of_every_candidate_is_counted(model: Model, cluster: Any, batch: int) -> None:
    result = search(model, cluster, work(batch, 1024))
    illegal = sum(count for why, count in result.rejected.items() if why != "memory")
    assert illegal + result.legal == result.candidates
    assert sum(result.bounds.values()) + result.simulated == result.legal
    too_large = sum(count for name, count in result.bounds.items() if name.startswith("memory"))
    assert result.rejected.get("memory", 0) == too_large


def test_rejections_have_their_reasons() -> None:
    result = search(tiny(layers=3, kv_heads=2, heads=6), gpus(1, 8), work(12))
    assert result.rejected == {
        "batch arithmetic": 1,
        "divisibility: more stages than layers": 3,
        "divisibility: tensor degree and heads": 3,
    }


def test_every_plan_has_a_reason() -> None:
    result = search(tiny(), gpus(2, 4), work(16))
    assert result.plans[0].reason.startswith("fastest: ")
    for candidate in result.plans[1:]:
        assert "slower" in candidate.reason or "as fast" in candidate.reason


# --- what runs today ---------------------------------------------------------------------------


def test_on_cpus_every_plan_runs() -> None:
    model = tiny()
    result = search(model, cpus(4), work())
    assert all(unrunnable(candidate.plan, model) == [] for candidate in result.plans)
    assert result.runnable is result.plans[0]


def _only_alone(plan: Plan, model: Model) -> Iterator[str]:
    yield from ["context parallelism"] if plan.cp > 1 else []


def test_on_gpus_the_best_plan_that_runs_is_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_unrunnable", _only_alone)  # as if it were priced only
    model = load_model("mistral-7b-v0.1")
    result = search(
        model, parse_cluster("1x8xA100-SXM4-80GB"), Workload(sequence_length=32768, global_batch=8)
    )
    assert result.runnable is not None
    assert unrunnable(result.runnable.plan, model) == []
    assert not result.plans[0].prediction.runnable
    assert "priced, not runnable" in result.plans[0].reason


def test_the_best_plan_that_runs_is_the_best_when_only_such_are_asked_for() -> None:
    model, cluster = tiny(), gpus(1, 4)
    pinned = search(model, cluster, work(), fixed={"zero": "1", "recompute": "none"})
    result = search(model, cluster, work())
    assert result.runnable is not None
    assert result.runnable.prediction.step_time_s <= pinned.plans[0].prediction.step_time_s


# --- pins --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": "2"},
        {"pp": "2", "microbatch": "2"},
        {"dp": "4", "zero": "1"},
        {"sp": "1", "tp": "4"},
        {"recompute": "full"},
        {"schedule": "gpipe", "pp": "4"},
        {"layers": "2+4"},
        {"precision": "fp32"},
        {"attention": "flash", "compile": "true"},
        {"bucket_bytes": "1048576"},
        {"zero": "3"},
    ],
    ids=str,
)
def test_pins_are_kept(fixed: dict[str, str]) -> None:
    result = search(tiny(), gpus(1, 4), work(), fixed=fixed)
    assert result.plans
    names = {"sp": "sequence_parallel"}
    for candidate in result.plans:
        plan = candidate.plan
        for key, value in fixed.items():
            if key == "layers":
                assert "+".join(str(stage.num_layers) for stage in plan.stages) == value
            elif key == "precision":
                assert plan.precision.parameter == value
            else:
                assert str(getattr(plan, names.get(key, key))) in (
                    value,
                    {"1": "True"}.get(value, value.title()),
                )


def test_an_unknown_pin_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="recompute"):
        search(tiny(), gpus(1, 4), work(), fixed={"recompte": "full"})


def test_pins_that_cannot_be_multiplied_to_the_cluster_are_refused_with_those_that_can() -> None:
    with pytest.raises(PlanError) as caught:
        search(tiny(), gpus(1, 4), work(), fixed={"tp": "2", "pp": "4"})
    text = str(caught.value)
    assert "tp=2 x pp=4 x cp=1 x dp=1 = 8" in text
    assert "tp=2,pp=2,dp=1" in text


def test_every_rule_that_pins_break_is_listed() -> None:
    fixed = {"tp": "3", "microbatch": "5", "layers": "2+5"}
    with pytest.raises(PlanError) as caught:
        search(tiny(kv_heads=2, heads=8), gpus(1, 6), work(), fixed=fixed)
    text = str(caught.value)
    for part in ("KV heads", "microbatch 5", "7 together"):
        assert part in text
    assert len(caught.value.problems) >= 3


def test_offered_tensor_degrees_work() -> None:
    """PUB-001: 14 query heads, 2 KV heads."""
    model = tiny(heads=14, kv_heads=2, head_dim=8)
    with pytest.raises(PlanError, match="14 query heads and 2 KV heads") as caught:
        search(model, cpus(4), work(), fixed={"tp": "4"})
    assert "tp in 1, 2" in str(caught.value)
    for tensor in ("1", "2"):
        assert search(model, cpus(4), work(), fixed={"tp": tensor}).plans


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_equation() -> None:
    with pytest.raises(PlanError) as caught:
        search(tiny(), cpus(4), work(8), fixed={"dp": "4", "microbatch": "4"})
    assert "global batch 8 / (microbatch 4 x DP 4)" in str(caught.value)
    assert "microbatch 2" in str(caught.value)


def test_a_schedule_without_chunks_refuses_them() -> None:
    with pytest.raises(PlanError, match="chunks=2 with schedule=1f1b"):
        search(tiny(), gpus(1, 2), work(), fixed={"chunks": "2", "schedule": "1f1b"})


def test_fixed_chunks_try_every_schedule_that_has_as_many() -> None:
    result = search(tiny(), gpus(1, 2), work(), fixed={"chunks": "2", "pp": "2"}, top=400)
    found = {candidate.plan.schedule for candidate in result.plans}
    assert found == {"interleaved", "breadth-first", "zb-v", "dualpipe-v"}
    assert all(candidate.plan.chunks == 2 for candidate in result.plans)


def test_a_fixed_schedule_brings_the_chunks_it_needs() -> None:
    (best, *_) = search(tiny(), gpus(1, 2), work(), fixed={"schedule": "zb-v", "pp": "2"}).plans
    assert (best.plan.schedule, best.plan.chunks, len(best.plan.stages)) == ("zb-v", 2, 4)


def test_a_schedule_with_too_few_micro_batches_everywhere_is_refused() -> None:
    with pytest.raises(PlanError, match="2 micro-batches on 2 pipeline ranks with schedule=zb-h2"):
        search(tiny(), gpus(1, 2), work(2), fixed={"schedule": "zb-h2", "pp": "2"})


# --- nothing fits ------------------------------------------------------------------------------


def test_when_nothing_fits_the_least_bad_plan_says_what_it_needs() -> None:
    """PUB-003: a device memory limit of 1 MiB, then the stated need."""
    model, cluster = tiny(), with_memory(cpus(4), 2**20)
    result = search(model, cluster, work())
    assert result.plans == ()
    assert result.rejected["memory"] == result.candidates > 0
    assert result.closest is not None
    assert result.closest.over_bytes == result.closest.needed_bytes - 2**20
    assert not result.closest.prediction.fits
    assert any("devices with at least" in change for change in result.closest.changes)
    assert search(model, with_memory(cluster, result.closest.needed_bytes), work()).plans


def test_just_below_the_smallest_need_nothing_fits() -> None:
    model, cluster = tiny(), with_memory(gpus(1, 4), 2**20)
    closest = search(model, cluster, work()).closest
    assert closest is not None
    below = closest.needed_bytes - 4096
    assert search(model, with_memory(cluster, below), work()).plans == ()
    assert search(model, with_memory(cluster, closest.needed_bytes), work()).plans


def test_a_plan_fits_only_with_the_error_bar_of_its_peak_unless_less_is_asked_for() -> None:
    model, cluster = tiny(), gpus(1, 4)
    free = search(model, cluster, work(), objective=Objective(name="memory"), top=1)
    peak = free.plans[0].prediction.peak_memory_gib * 2**30
    tight = with_memory(cluster, 1.05 * peak)
    result = search(model, tight, work())
    assert result.plans == () and result.closest is not None
    assert result.closest.prediction.fits
    assert result.closest.needed_bytes == pytest.approx(peak * (1 + MEMORY_SPARE), rel=1e-5)
    assert result.closest.changes[0].startswith("--spare 5, within the error bar")
    assert result.closest.changes[0].endswith("fits with 5.0% to spare")
    less = search(model, tight, work(), spare=0.04)
    assert less.spare == 0.04 and less.plans
    assert all(candidate.prediction.memory_spare >= 0.04 for candidate in less.plans)
    for candidate in search(model, cluster, work(), top=8).plans:
        assert candidate.prediction.memory_spare >= MEMORY_SPARE
        assert "to spare" in candidate.reason or candidate.behind


def test_a_pin_that_stands_in_the_way_is_named() -> None:
    model, sequence = tiny(vocab=20_000), 2048
    free = search(model, gpus(1, 4), work(16, sequence))
    needs = min(candidate.prediction.peak_memory_gib for candidate in free.plans)
    cluster = gpus(1, 4, memory_bytes=needs * 1.02 * (1 + MEMORY_SPARE) * 2**30)
    fixed = {"microbatch": "16", "recompute": "none", "zero": "0", "pp": "1", "tp": "4"}
    result = search(model, cluster, work(16, sequence), fixed=fixed)
    assert result.closest is not None
    assert any(change.startswith("without microbatch=16:") for change in result.closest.changes)


def test_more_devices_are_offered_when_they_help() -> None:
    model, where = load_model("llama-3.1-70b"), parse_cluster("1x8xA100-SXM4-40GB")
    fixed = {"microbatch": "1", "schedule": "1f1b"}
    result = search(model, where, Workload(sequence_length=4096, global_batch=64), fixed=fixed)
    assert result.closest is not None
    more = next(change for change in result.closest.changes if "devices instead of 8" in change)
    grown = parse_cluster(f"{int(more.split()[0]) // 8}x8xA100-SXM4-40GB")
    work = Workload(sequence_length=4096, global_batch=64)
    best = search(model, grown, work, fixed=fixed, top=1).plans[0]
    assert f"{best.plan.short()} takes" in more


def test_the_smallest_device_that_would_hold_a_plan_is_named() -> None:
    model, work = load_model("llama-3.1-70b"), Workload(sequence_length=4096, global_batch=8)
    fixed = {"zero": "0", "pp": "1"}
    result = search(model, parse_cluster("1x8xH100-SXM"), work, fixed=fixed)
    assert result.closest is not None
    assert result.closest.changes[-1].endswith("as B200-SXM-180GB has")
    assert search(model, parse_cluster("1x8xB200-SXM-180GB"), work, fixed=fixed).plans


def test_what_most_of_the_computing_is_spent_on_binds() -> None:
    h100 = parse_cluster("1x8xH100-SXM")
    large = search(load_model("llama-3.1-8b"), h100, work(64, 4096), top=1)
    assert any(text.startswith("arithmetic: ") for text in large.binding)
    small = search(tiny(), gpus(1, 1), work(8, 32), top=1)
    assert any(text.startswith("host: ") for text in small.binding)


# --- what must never get worse -----------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [tiny(), tiny(layers=3, vocab=60_000)], ids=["even", "heavy head"]
)
def test_more_memory_never_makes_the_best_plan_slower(model: Model) -> None:
    times = []
    for memory_bytes in (1.75e9, 1.9e9, 2.5e9, 4e9, 8e9):
        result = search(model, gpus(1, 4, memory_bytes=memory_bytes), work(16, 2048))
        if result.plans:
            times.append(result.plans[0].prediction.step_time_s)
    assert len(times) >= 3
    assert times == sorted(times, reverse=True)


def test_more_bandwidth_never_makes_the_best_plan_slower() -> None:
    times = [
        search(tiny(), gpus(2, 4, network_bytes_per_s=rate), work(16)).plans[0]
        for rate in (1e9, 5e9, 25e9, 100e9)
    ]
    seconds = [candidate.prediction.step_time_s for candidate in times]
    assert seconds == sorted(seconds, reverse=True)


def test_a_pin_never_makes_the_best_plan_faster() -> None:
    free = search(tiny(), gpus(1, 4), work()).plans[0].prediction.step_time_s
    for fixed in ({"tp": "4"}, {"zero": "0"}, {"recompute": "full"}, {"microbatch": "1"}):
        pinned = search(tiny(), gpus(1, 4), work(), fixed=fixed).plans[0]
        assert pinned.prediction.step_time_s >= free


# --- spaces ------------------------------------------------------------------------------------


def test_tensor_parallelism_leaves_the_node_only_if_nothing_fits_within() -> None:
    plans = search(tiny(), gpus(4, 2), work(), top=20).plans
    assert max(candidate.plan.tp for candidate in plans) == 2
    pinned = search(tiny(), gpus(4, 2), work(), fixed={"tp": "8"}).plans
    assert pinned[0].plan.tp == 8


def test_long_sequences_bring_context_parallelism_in() -> None:
    short = search(tiny(), gpus(1, 4), work(4), top=50)
    long = search(tiny(), gpus(1, 4), work(4, 65536), top=50)
    assert {candidate.plan.cp for candidate in short.plans} == {1}
    assert {candidate.plan.cp for candidate in long.plans} > {1}
    methods = {(candidate.plan.cp > 1, candidate.plan.context_method) for candidate in long.plans}
    assert methods == {(False, "ring"), (True, "ring"), (True, "ulysses")}
    pinned = search(tiny(), gpus(1, 4), work(4), fixed={"cp": "2", "context_method": "ulysses"})
    assert {candidate.plan.context_method for candidate in pinned.plans} == {"ulysses"}


def test_a_large_search_simulates_few_plans_and_is_small_and_without_torch() -> None:
    """`triptych plan llama-3.1-70b` on 64 GPUs: the search's part of 300 MB."""
    script = r"""
import re, sys
from pathlib import Path
from triptych.cluster.text import parse_cluster
from triptych.model.load import load_model
from triptych.plan.workload import Workload
from triptych.search.search import search
work = Workload(sequence_length=8192, global_batch=512)
result = search(load_model("llama-3.1-70b"), parse_cluster("8x8xH100-SXM"), work)
assert result.plans and result.runnable
# not ru_maxrss, which an exec inherits from the process that forked
peak_kb = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
print(result.legal, result.simulated, int(peak_kb) // 1024)
print(sorted({"torch", "numpy", "scipy", "pydantic", "rich"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    figures, heavy = run.stdout.splitlines()
    legal, simulated, rss_mb = map(int, figures.split())
    assert legal > 300_000 and simulated < 100
    assert rss_mb < 300
    assert heavy == "[]"
