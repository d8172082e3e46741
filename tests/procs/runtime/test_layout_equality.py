"""Any layout = one process: loss, gradient norm, every gradient, weights and moments."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import pytest
from layouts import DOUBLE, Run, assert_equal_runs, merge, tiny_config, train
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision

FP32 = Precision()
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "TP3 uneven": {"tp": 3},
    "TP4 copied KV heads": {"tp": 4},
    "TP4+SP copied KV heads": {"tp": 4, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 GPipe": {"pp": 2, "schedule": "gpipe"},
    "PP3 uneven": {"pp": 3},
    "DP2": {"dp": 2},
    "DP4": {"dp": 4, "microbatch": 1},
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-1 on 3 ranks, small buckets": {"dp": 3, "zero": 1, "bucket_bytes": 20_000},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP2xDP2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "PP2xDP2 ZeRO-1": {"pp": 2, "dp": 2, "zero": 1},
    "recompute": {"recompute": "full"},
    "TP2xPP2 ZB-H1 recompute every 3rd": {
        "tp": 2,
        "pp": 2,
        "schedule": "zb-h1",
        "recompute": "full",
        "recompute_every": 3,
    },
    "TP2xPP2+SP recompute": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
    "CP2": {"cp": 2},
    "CP2xTP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "CP2xDP2 ZeRO-1": {"cp": 2, "dp": 2, "zero": 1},
    "CP2xPP2 ZeRO-3 recompute": {"cp": 2, "pp": 2, "zero": 3, "recompute": "full"},
    "2x2x2": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True},
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied, vocabulary 503": {
        "tie_word_embeddings": True,
        "vocab_size": 503,
        "num_key_value_heads": 4,
        "num_attention_heads": 8,
    },
}


CASES = [("untied", True), ("tied, vocabulary 503", True), ("untied", False)]


def _plan(layout: str, model: str, double: bool) -> Plan:
    settings = {"microbatch": 2, **LAYOUTS[layout]}
    kv_heads = int(tiny_config(**MODELS[model])["num_key_value_heads"])
    if settings.get("tp", 1) > kv_heads and settings["tp"] % kv_heads:
        settings["tp"] = 2
    return Plan.uniform(4, precision=DOUBLE if double else FP32, **settings)


def _sequences(plan: Plan) -> int:
    """Two micro-batches a replica at least, four of a pipeline."""
    return 12 if plan.dp == 3 else 4 if plan.dp == plan.pp == 1 else 8


def _train(plan: Plan, model: str, double: bool, sequences: int) -> Run:
    # A large epsilon keeps Adam from dividing rounding noise by its own size.
    settings = {"clip_norm": 0.0 if double else 0.5, "eps": 1e-2}
    return train(plan, tiny_config(**MODELS[model]), sequences=sequences, **settings)


@cache
def _reference(model: str, double: bool, sequences: int) -> Run:
    plan = Plan.uniform(4, precision=DOUBLE if double else FP32, microbatch=sequences)
    return merge(run_ranks(1, _train, plan, model, double, sequences))


@lru_cache(maxsize=2)  # cases come by layout; a small process forks fast
def _runs(layout: str, world: int) -> dict[tuple[str, bool], Run]:
    """Every case of a layout that has so many ranks, one after the other on the same ones."""
    plans = {case: _plan(layout, *case) for case in CASES}
    mine = [case for case in CASES if plans[case].world_size == world]

    def body() -> list[Run]:
        return [_train(plans[case], *case, _sequences(plans[case])) for case in mine]

    by_rank = run_ranks(world, body, timeout_s=240)
    return {
        case: merge(list(parts))
        for case, parts in zip(mine, zip(*by_rank, strict=True), strict=True)
    }


@pytest.mark.parametrize(("model", "double"), CASES, ids=["untied", "tied 503", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_one_process(layout: str, model: str, double: bool) -> None:
    """User case pub_027."""
    plan = _plan(layout, model, double)
    run = _runs(layout, plan.world_size)[model, double]
    expected = _reference(model, double, _sequences(plan))
    assert_equal_runs(run, expected, 1e-12 if double else 1e-5)
