"""Steady states: latencies, throughput and memory of serving plans, against their identities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from triptych.cluster.text import parse_cluster
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.layout import layout
from triptych.cost.serving.memory import memory
from triptych.cost.serving.predict import ServingPrediction, predict_serving
from triptych.model.count import parameters
from triptych.model.load import load_model
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.units import GIB

MODEL = load_model("llama-3.1-8b")
CLUSTER = parse_cluster("1x8xH100-SXM")
PLAN = ServingPlan(layers=(32,), tensor=2, replicas=4, batch=64, chunk=2048)
REQUESTS = ServingWorkload(input_tokens=1024, output_tokens=256)


QUIET = replace(TRIPTYCH, token_s=0.0)


def predict(plan: ServingPlan = PLAN, engine: Engine = QUIET, **asked: float) -> ServingPrediction:
    return predict_serving(MODEL, CLUSTER, replace(REQUESTS, **asked), plan, engine)


def test_littles_law_holds_without_a_queue() -> None:
    one = predict(concurrency=32)
    cycle_s = one.prefill_s + 255 * one.tpot_s
    assert one.batch == 8 and one.queue_s == 0
    assert one.requests_per_s * cycle_s == pytest.approx(32)
    assert one.output_tokens_per_s == pytest.approx(256 * one.requests_per_s)


def test_users_beyond_the_batch_wait() -> None:
    full, more = predict(concurrency=256), predict(concurrency=512)
    assert full.batch == more.batch == 64
    assert more.requests_per_s == pytest.approx(full.requests_per_s)
    assert more.queue_s == pytest.approx(256 / more.requests_per_s)
    assert more.ttft_s == pytest.approx(full.ttft_s + more.queue_s)


def test_a_rate_runs_as_many_as_arrive_while_one_is_answered() -> None:
    one = predict(rate=20.0)
    cycle_s = one.prefill_s + 255 * one.tpot_s
    assert one.batch * 4 == pytest.approx(20.0 * cycle_s, rel=0.01)
    assert one.requests_per_s == 20.0
    later = predict(rate=40.0)
    assert later.ttft_s > one.ttft_s and later.tpot_s > one.tpot_s


def test_beyond_the_most_requests_waiting_has_no_end() -> None:
    most = predict().max_requests_per_s
    over = predict(rate=1.01 * most, ttft_s=10.0)
    assert math.isinf(over.ttft_s) and over.requests_per_s == pytest.approx(most)
    assert over.meets == {"ttft": False, "rate": False}


def test_the_process_that_streams_answers_limits_them() -> None:
    slow = replace(TRIPTYCH, token_s=4e-4)  # 2,500 tokens a second of each replica
    quick, late = predict(concurrency=200), predict(engine=slow, concurrency=200)
    assert quick.output_tokens_per_s > 1.2 * 4 * 2500
    assert 0.9 * 4 * 2500 < late.output_tokens_per_s < 4 * 2500
    assert late.batch < quick.batch == 50
    assert late.ttft_s > quick.ttft_s + 0.5 * late.queue_s
    cycle_s = late.prefill_s + 255 * late.tpot_s
    assert late.requests_per_s * (cycle_s + late.queue_s) == pytest.approx(200, rel=0.02)
    assert predict(engine=slow).max_requests_per_s * 256 <= 4 * 2500
    over = predict(engine=slow, rate=45.0)
    assert not over.meets["rate"] and math.isinf(over.ttft_s)


def test_batch_trades_latency_for_throughput() -> None:
    by_batch = [predict(replace(PLAN, batch=batch)) for batch in (1, 8, 64)]
    assert [p.tpot_s for p in by_batch] == sorted(p.tpot_s for p in by_batch)
    assert [p.output_tokens_per_s for p in by_batch] == sorted(
        p.output_tokens_per_s for p in by_batch
    )


def test_small_chunks_shorten_steps_and_draw_out_prompts() -> None:
    small, large = (predict(replace(PLAN, chunk=chunk), concurrency=4) for chunk in (256, 8192))
    assert small.prefill_s > large.prefill_s


def test_a_pipeline_keeps_the_latency_and_multiplies_the_throughput() -> None:
    one = ServingPlan(layers=(32,), tensor=1, replicas=1, batch=128, chunk=2048)
    two = replace(one, layers=(17, 15))
    flat, deep = predict(one, concurrency=64), predict(two, concurrency=128)
    assert deep.output_tokens_per_s > 1.6 * flat.output_tokens_per_s
    assert 0.9 * flat.tpot_s < deep.tpot_s < 1.3 * flat.tpot_s


def test_a_first_burst_counts_where_users_send_few_requests() -> None:
    once, often = predict(concurrency=256, rounds=1), predict(concurrency=256, rounds=100)
    steady = predict(concurrency=256)
    assert once.ttft_s > often.ttft_s
    assert often.ttft_s == pytest.approx(steady.ttft_s, rel=0.25)


# --- memory --------------------------------------------------------------------------------------


def test_the_cache_is_what_weights_and_work_space_leave() -> None:
    one = predict()
    whole = 80 * GIB * TRIPTYCH.memory_share / GIB
    assert one.weights_gib + one.workspace_gib + one.kv_cache_gib == pytest.approx(whole)
    assert one.weights_gib == pytest.approx(2 * parameters(MODEL) / 2 / GIB, rel=1e-3)
    assert one.fits and one.max_concurrency == 4 * 64


def test_the_cache_limits_the_batch() -> None:
    one = predict(replace(PLAN, batch=100_000, chunk=16384), input_tokens=30_000)
    token_bytes = 131_072 / 2
    room = one.kv_cache_gib * GIB / (token_bytes * (30_000 + 128))
    assert one.max_concurrency // 4 == int(room)


def test_windows_cap_what_a_sequence_holds() -> None:
    model = load_model("gemma-2-9b")
    chosen = ServingPlan(layers=(42,), tensor=1, replicas=1, batch=1, chunk=2048)
    stage = memory(layout(model, chosen), CLUSTER, chosen, TRIPTYCH).stages[0]
    per_layer = 2 * 8 * 256 * 2
    assert stage.sequence_bytes(1000) == 42 * per_layer * 1000
    assert stage.sequence_bytes(8192) == 21 * per_layer * 8192 + 21 * per_layer * 4096


def test_what_does_not_fit_says_by_how_much() -> None:
    model = load_model("llama-3.1-405b")
    chosen = ServingPlan(layers=(126,), tensor=8, replicas=1, batch=8, chunk=512)
    one = predict_serving(model, CLUSTER, REQUESTS, chosen)
    assert not one.fits and math.isinf(one.ttft_s) and one.max_concurrency == 0
    needed = one.weights_gib + one.workspace_gib + 516_096 / 8 * 1280 / GIB
    assert one.over_bytes == pytest.approx((needed - one.memory_limit_gib) * GIB)
    assert predict_serving(model, CLUSTER, REQUESTS, replace(chosen, weights="fp8")).fits
