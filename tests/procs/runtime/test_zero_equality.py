"""ZeRO-2, ZeRO-3 and hybrid sharding = one process: loss, norm, gradients, weights, moments."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import pytest
from layouts import (
    DOUBLE,
    Run,
    assert_equal_runs,
    batch_of,
    make_engine,
    merge,
    strictly,
    tiny_config,
    train,
)
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision
from triptych.runtime.pipeline.interpreter import MicroBatch

LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-2": {"dp": 2, "zero": 2},
    "ZeRO-2 on 3 ranks, small buckets": {"dp": 3, "zero": 2, "bucket_bytes": 20_000},
    "ZeRO-2, whole gradients till the last": {"dp": 2, "zero": 2, "accumulation": "reduce_last"},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "ZeRO-3 on 3 ranks": {"dp": 3, "zero": 3},
    "ZeRO-3 on 4 ranks": {"dp": 4, "zero": 3, "microbatch": 1},
    "ZeRO-3, whole gradients till the last": {"dp": 2, "zero": 3, "accumulation": "reduce_last"},
    "ZeRO-3 without prefetch": {"dp": 2, "zero": 3, "prefetch": 0},
    "ZeRO-3, prefetch beyond the model": {"dp": 2, "zero": 3, "prefetch": 9},
    "ZeRO-3 recompute": {"dp": 2, "zero": 3, "recompute": "full"},
    "hybrid ZeRO-1": {"dp": 4, "zero": 1, "hybrid_shard": 2, "microbatch": 1},
    "hybrid ZeRO-2": {"dp": 4, "zero": 2, "hybrid_shard": 2, "microbatch": 1},
    "hybrid ZeRO-3": {"dp": 4, "zero": 3, "hybrid_shard": 2, "microbatch": 1},
    "offloaded optimizer": {"dp": 2, "zero": 3, "offload": "optimizer"},
    "TP2+SP x ZeRO-2": {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True},
    "TP2+SP x ZeRO-3": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
    "TP4 copied KV heads x ZeRO-3": {"tp": 4, "dp": 2, "zero": 3},
    "PP2 x ZeRO-2": {"pp": 2, "dp": 2, "zero": 2},
    "PP2 x ZeRO-3": {"pp": 2, "dp": 2, "zero": 3},
    "PP2 GPipe x ZeRO-2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "gpipe"},
    "PP2 GPipe x ZeRO-3 recompute": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "gpipe",
        "recompute": "full",
    },
    "ZB-H1 x ZeRO-3": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h1"},
    "interleaved x ZeRO-3": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "interleaved",
        "chunks": 2,
        "microbatch": 1,
    },
    "ZB-V x ZeRO-2": {
        "pp": 2,
        "dp": 2,
        "zero": 2,
        "schedule": "zb-v",
        "chunks": 2,
        "microbatch": 1,
    },
    "DualPipe-V x ZeRO-3": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "dualpipe-v",
        "chunks": 2,
        "microbatch": 1,
    },
    "PP4 of one layer x ZeRO-3": {"pp": 4, "dp": 2, "zero": 3, "microbatch": 1},
    "TP2+SP x PP2 x ZeRO-3": {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied, vocabulary 503": {
        "tie_word_embeddings": True,
        "vocab_size": 503,
        "num_key_value_heads": 4,
    },
}
PRECISIONS = {"fp64": (DOUBLE, 1e-12), "fp32": (Precision(), 1e-5)}


CASES = [("tied, vocabulary 503", "fp64"), ("untied", "fp32")]


def _sequences(plan: Plan) -> int:
    """Two micro-batches a replica at least, four of most pipelines."""
    return 12 if plan.dp == 3 else 8


def _train(model: str, precision: str, sequences: int, **settings: Any) -> Run:
    plan = Plan.uniform(4, precision=PRECISIONS[precision][0], **settings)
    clip_norm = 0.0 if precision == "fp64" else 0.5
    # A large epsilon keeps Adam from dividing rounding noise by its own size.
    config = tiny_config(**MODELS[model])
    return train(plan, config, sequences=sequences, eps=1e-2, clip_norm=clip_norm)


@cache
def _reference(model: str, precision: str, sequences: int) -> Run:
    return merge(run_ranks(1, lambda: _train(model, precision, sequences, microbatch=sequences)))


def _plan(layout: str) -> Plan:
    return Plan.uniform(4, **{"microbatch": 2, **LAYOUTS[layout]})


@lru_cache(maxsize=2)  # cases come by layout; a small process forks fast
def _runs(layout: str) -> dict[tuple[str, str], Run]:
    """Every case of a layout, one after the other on the same ranks."""
    settings = {"microbatch": 2, **LAYOUTS[layout]}
    plan = _plan(layout)

    def body() -> list[Run]:
        return [_train(*case, _sequences(plan), **settings) for case in CASES]

    by_rank = run_ranks(plan.world_size, body, timeout_s=240)
    return {
        case: merge(list(parts))
        for case, parts in zip(CASES, zip(*by_rank, strict=True), strict=True)
    }


@pytest.mark.parametrize(("model", "precision"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_sharding_equals_one_process(layout: str, model: str, precision: str) -> None:
    run = _runs(layout)[model, precision]
    expected = _reference(model, precision, _sequences(_plan(layout)))
    assert_equal_runs(run, expected, PRECISIONS[precision][1])


@pytest.mark.parametrize("zero", [2, 3])
def test_bf16_with_fp32_master_weights_is_zero_1(zero: int) -> None:
    def body(stage: int) -> Run:
        plan = Plan.uniform(4, dp=2, zero=stage, microbatch=6, precision=Precision.mixed())
        return train(plan, tiny_config(), sequences=12, gradients=False)

    ours, zero_1 = (merge(run_ranks(2, body, stage)) for stage in (zero, 1))
    # Buckets are cut elsewhere, so the norm that clips may differ in its last bit.
    assert_equal_runs(ours, zero_1, 1e-6)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing(zero: int) -> None:
    def body() -> bool:
        plan = Plan.uniform(4, dp=2, zero=zero)
        engine = make_engine(plan, tiny_config())
        rows = [MicroBatch(i[None], y[None]) for i, y in batch_of(0, 2, 24, 512)]
        engine.step(rows, 1e-2)
        before = [shard.tensor.detach().clone() for shard in engine.shards()]
        layer = engine.stages[0].causal_lm.get_submodule("model.layers.1")
        handle = layer.register_forward_hook(lambda module, args, out: out * float("inf"))
        strictly(1)
        engine.step(rows, 1e-2)
        handle.remove()
        after = [shard.tensor.detach() for shard in engine.shards()]
        return all(a.equal(b) for a, b in zip(after, before, strict=True))

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_may_evaluate_different_numbers_of_micro_batches(zero: int) -> None:
    rows = batch_of(3, 3, 24, 512)

    def body(plan: Plan) -> tuple[float, int]:
        engine = make_engine(plan, tiny_config())
        mine = rows if plan.dp == 1 else [rows[:3], rows[3:]][engine.mesh.coordinates.dp]
        return engine.evaluate([MicroBatch(i[None], y[None]) for i, y in mine])

    (expected, tokens), *_ = run_ranks(1, body, Plan.uniform(4))
    for loss, count in run_ranks(2, body, Plan.uniform(4, dp=2, zero=zero)):
        assert count == tokens and loss == pytest.approx(expected, rel=1e-6)
