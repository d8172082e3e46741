"""Whole predictions: terms that add up, published runs, and what must never get worse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from cost_samples import cluster, frame_of, llama, plan, work

from triptych.cluster.cluster import Cluster
from triptych.cost import step as step_module
from triptych.cost.predict import predict
from triptych.cost.prediction import TIME_TERMS, Prediction
from triptych.cost.pricer import Pricer
from triptych.cost.software import TRIPTYCH
from triptych.cost.step import (
    Priced,
    is_exact,
    price_step,
    step_bound_s,
    step_seconds,
)
from triptych.cost.storage import Storage
from triptych.cost.sync import step_tail
from triptych.model.count import training_flops_per_token
from triptych.model.model import Experts
from triptych.plan.plan import Precision, Stage

PLANS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 4, "schedule": "gpipe"},
    {"dp": 2},
    {"dp": 4, "zero": 1},
    {"dp": 2, "zero": 3},
    {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "recompute": "full"},
    {"cp": 2, "dp": 2},
    {"pp": 2, "chunks": 2, "schedule": "interleaved"},
    {"chunks": 2, "schedule": "interleaved"},
    {"pp": 2, "chunks": 2, "schedule": "breadth-first", "dp": 2, "zero": 3},
    {"pp": 4, "schedule": "zb-h1", "tp": 2},
    {"pp": 2, "schedule": "zb-h2", "recompute": "full"},
    {"pp": 2, "chunks": 2, "schedule": "zb-v"},
    {"pp": 2, "chunks": 2, "schedule": "dualpipe-v", "dp": 2, "zero": 1},
    {"pp": 3, "schedule": "zb-auto"},
]


def priced(where: Cluster | None = None, **settings: Any) -> Prediction:
    model = llama(layers=5, hidden=256, width=704, vocab=8000)
    chosen = plan(model, **settings)
    return predict(model, where or cluster(chosen.world_size), work(512, 16), chosen)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_terms_add_up(settings: dict[str, Any], kind: str) -> None:
    chosen = plan(llama(), **settings)
    prediction = priced(cluster(chosen.world_size, kind=kind), **settings)
    assert tuple(prediction.time_s) == TIME_TERMS
    assert min(prediction.time_s.values()) >= 0
    assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)
    assert sum(prediction.memory_gib.values()) == pytest.approx(prediction.peak_memory_gib)


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_bound_is_below_the_simulation_and_exact_for_one_stage(
    settings: dict[str, Any],
) -> None:
    model = llama(layers=5, vocab=9000)
    chosen = plan(model, **settings)
    frame, storage = frame_of(model, chosen), Storage.of(chosen)
    terms = Priced.of(frame, storage)
    bound_s = step_bound_s(frame, terms, chosen.schedule)
    whole_s = price_step(frame, terms, chosen.schedule).total_s
    assert step_seconds(frame, terms, chosen.schedule) == pytest.approx(whole_s, rel=1e-12)
    assert bound_s <= whole_s * (1 + 1e-12)
    if chosen.pp == 1:
        assert bound_s == pytest.approx(whole_s, rel=1e-12)


def test_the_timeline_is_that_of_the_program() -> None:
    prediction = priced(pp=2, microbatch=2)
    assert prediction.timeline is not None
    assert len(prediction.timeline.spans) == 2 * 2 * 8
    assert prediction.bubble_fraction == pytest.approx(prediction.timeline.bubble_fraction)
    before_s = prediction.step_time_s - prediction.timeline.makespan_s
    assert before_s == pytest.approx(
        prediction.time_s["optimizer"] + prediction.time_s["data_comm"]
    )


def test_one_stage_has_no_bubble() -> None:
    prediction = priced(dp=2)
    assert prediction.bubble_fraction == prediction.time_s["bubble"] == 0.0


def test_programs_that_are_searched_for_continue_at_their_steady_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama(layers=5, vocab=9000)
    chosen = plan(model, pp=2, schedule="zb-auto")
    frame = frame_of(model, chosen, workload=work(40, 200))
    terms = Priced.of(frame, Storage.of(chosen))
    whole = price_step(frame, terms, "zb-auto")
    frame.pricer.ends_s.clear()
    monkeypatch.setattr(step_module, "SEARCHED_ACTIONS", 80)
    shortened = price_step(frame, terms, "zb-auto")
    assert not is_exact(frame, "zb-auto")
    assert shortened.total_s == pytest.approx(whole.total_s, rel=1e-2)


def test_what_is_too_long_to_be_drawn_has_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert priced(pp=2).timeline is not None
    monkeypatch.setattr(step_module, "SHOWN_ACTIONS", 8)
    assert priced(pp=2).timeline is None


def test_mfu_counts_model_flops_and_hfu_what_is_run_again_too() -> None:
    plain, again = priced(), priced(recompute="full")
    flops = training_flops_per_token(llama(layers=5, hidden=256, width=704, vocab=8000), 512)
    assert plain.mfu == pytest.approx(flops * 512 * 16 / plain.step_time_s / 300e12)
    assert plain.hfu == plain.mfu
    assert again.hfu > again.mfu
    assert again.step_time_s > plain.step_time_s
    assert again.peak_memory_gib < plain.peak_memory_gib


def test_fused_kernels_are_never_slower_and_never_larger() -> None:
    eager, fused = priced(), priced(compile=True)
    assert fused.step_time_s <= eager.step_time_s
    assert fused.peak_memory_gib <= eager.peak_memory_gib


@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.parametrize(
    "better",
    [
        {"link_bytes_per_s": 900e9},
        {"network_bytes_per_s": 100e9},
        {"memory_bytes_per_s": 4e12},
        {"flops": 600e12},
        {"latency_s": 1e-6},
    ],
    ids=str,
)
def test_a_better_cluster_is_never_slower(
    settings: dict[str, Any], better: dict[str, float]
) -> None:
    size = plan(llama(), **settings).world_size
    nodes = 2 if size > 1 else 1
    ours, theirs = (
        cluster(size // nodes, nodes=nodes),
        cluster(size // nodes, nodes=nodes, **better),
    )
    assert priced(theirs, **settings).step_time_s <= priced(ours, **settings).step_time_s


@pytest.mark.parametrize("free_share", [1.0, 0.25, 0.0])
def test_a_long_backward_hides_all_buckets_but_the_last_as_far_as_devices_are_free(
    free_share: float,
) -> None:
    model = llama(layers=8, vocab=4096)
    chosen = plan(model, dp=2, bucket_bytes=64 * 1024)
    frame, storage = frame_of(model, chosen), Storage.of(chosen)
    held, axes = frame.costs[0].holdings, frame.axes(0)
    axes = axes._replace(data=replace(axes.data, free_share=free_share))
    tail = step_tail(
        held,
        storage,
        axes,
        last_backward_s=1e3,
        sequence_parallel=False,
        memory_bytes_per_s=1e12,
        matrix_flops_per_s=1e14,
        software=TRIPTYCH,
    )
    count = math.ceil(held.dense * 4 / chosen.bucket_bytes)
    bucket_s = axes.data.all_reduce_s(held.dense * 4 / count)
    assert tail.reduce_s == pytest.approx(bucket_s * max(1.0, count * (1.0 - free_share)))


def test_zero_1_shares_the_optimizer_and_sends_parameters_instead_of_gradients() -> None:
    plain, sharded = priced(dp=4), priced(dp=4, zero=1)
    assert sharded.memory_gib["optimizer"] == pytest.approx(plain.memory_gib["optimizer"] / 4)
    assert sharded.time_s["optimizer"] == pytest.approx(plain.time_s["optimizer"] / 4)
    assert sharded.bytes_sent_per_rank["data"] < plain.bytes_sent_per_rank["data"]


@pytest.mark.parametrize("zero", [0, 1])
def test_muon_keeps_one_moment_of_each_matrix_and_takes_the_time_of_its_products(zero: int) -> None:
    model = llama(layers=5, hidden=256, width=704, vocab=8000)
    chosen, where = plan(model, dp=2, zero=zero), cluster(2)
    adamw, muon = (
        predict(model, where, replace(work(512, 16), optimizer=name), chosen)
        for name in ("adamw", "muon")
    )
    shapes = [(256, 256), (256, 128), (256, 128), (256, 256), *[(256, 704)] * 3]
    shares = 2 if zero else 1
    elements = 5 * sum(rows * columns for rows, columns in shapes) / shares
    flops = 5 * sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes) / shares
    less_gib = adamw.memory_gib["optimizer"] - muon.memory_gib["optimizer"]
    assert less_gib * 1024**3 == pytest.approx(4 * elements)
    rate = Pricer(model, where, work()).rates("bf16").gemm_flops
    more_s = muon.time_s["optimizer"] - adamw.time_s["optimizer"]
    assert more_s == pytest.approx(flops / rate)
    assert any("Muon" in text for text in muon.assumptions["compute"])


def test_a_plan_that_is_too_large_says_so() -> None:
    needed = priced().peak_memory_gib
    assert priced(cluster(1, memory_bytes=needed * 1024**3)).fits
    assert not priced(cluster(1, memory_bytes=0.99 * needed * 1024**3)).fits


def test_what_does_not_run_today_is_marked_with_its_reasons() -> None:
    assert priced().runnable
    prediction = priced(dp=2, offload="parameters")
    assert not prediction.runnable
    assert any("offload" in reason for reason in prediction.reasons)


def test_the_json_document_has_the_fields_of_the_command_line() -> None:
    document = json.loads(json.dumps(priced(pp=2, dp=2).to_json()))
    assert document.keys() >= {
        "step_time_s",
        "tokens_per_s_per_gpu",
        "model_tflops_per_gpu",
        "mfu",
        "hfu",
        "peak_memory_gib",
        "memory_gib",
        "time_s",
        "bubble_fraction",
        "bytes_sent_per_rank",
        "fits",
        "plan",
        "assumptions",
    }
    assert document["memory_gib"].keys() == {
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "buffers",
        "overhead",
    }
    assert document["plan"]["pp"] == 2
    assert document["plan"]["precision"]["parameter"] == "bf16"


def test_stages_with_degrees_of_their_own_are_priced() -> None:
    model = llama(layers=4)
    stages = (Stage(start=0, stop=3, data=2, tensor=2), Stage(start=3, stop=4, data=2, tensor=1))
    chosen = replace(plan(model), stages=stages)
    prediction = predict(model, cluster(6), work(), chosen)
    assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)
    assert prediction.runnable


def test_experts_are_priced() -> None:
    model = llama(experts=Experts(count=8, top_k=2, width=64))
    chosen = plan(model, dp=4, ep=4, zero=1)
    prediction = predict(model, cluster(2, nodes=2), work(), chosen)
    assert prediction.time_s["expert_comm"] > 0
    assert sum(prediction.time_s.values()) == pytest.approx(prediction.step_time_s)


def test_an_fp32_plan_on_a_bf16_only_peak_is_priced_with_a_stand_in() -> None:
    where = cluster(1)
    device = replace(where.device, peak_flops={"bf16": 300e12})
    where = replace(where, groups=(replace(where.groups[0], device=device),))
    texts = priced(where, precision=Precision()).assumptions["compute"]
    assert any("stands in" in text for text in texts)
