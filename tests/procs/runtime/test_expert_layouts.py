"""Expert parallelism is one process, to the last digit in fp64, with every other technique."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from family_samples import family_config
from layouts import DOUBLE, Run, assert_equal_runs, merge, train
from ranks import run_ranks

from triptych.plan.plan import Plan

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP4 EP4": {"dp": 4, "ep": 4},
    "DP4 EP2": {"dp": 4, "ep": 2},
    "DP4 EP2 ZeRO-1": {"dp": 4, "ep": 2, "zero": 1},
    "DP4 EP2 ZeRO-2": {"dp": 4, "ep": 2, "zero": 2},
    "DP4 EP4 ZeRO-3": {"dp": 4, "ep": 4, "zero": 3},
    "DP4 EP2 ZeRO-3": {"dp": 4, "ep": 2, "zero": 3},
    "DP4 EP2 in shards of 2": {"dp": 4, "ep": 2, "zero": 3, "hybrid_shard": 2},
    "DP2 EP2 TP2+SP": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "DP2 EP2 TP2 ZeRO-3 recomputed": {"dp": 2, "ep": 2, "tp": 2, "zero": 3, "recompute": "full"},
    "CP2 DP2 EP4": {"cp": 2, "dp": 2, "ep": 4},
    "CP2 EP2 PP2 ZeRO-1": {"cp": 2, "ep": 2, "pp": 2, "zero": 1},
    "DP2 EP2 PP2 ZB-H1": {"dp": 2, "ep": 2, "pp": 2, "schedule": "zb-h1"},
}
FAMILIES = {
    "mixtral": list(LAYOUTS),
    "qwen3_moe": ["DP4 EP2 ZeRO-3"],
    "qwen2_moe": ["DP2 EP2 TP2 ZeRO-3 recomputed"],
    "olmoe": ["DP2 EP2 PP2 ZB-H1"],
    "deepseek_v3": ["DP4 EP2 ZeRO-1", "DP2 EP2 TP2+SP"],
    "gpt_oss": ["CP2 EP2 PP2 ZeRO-1", "DP2 EP2 TP2+SP"],
}


def _train(plan: Plan, family: str, freeze: str) -> Run:
    # Noise of gradients close to zero, which Adam's usual eps would magnify.
    return train(plan, family_config(family), eps=1e-2, freeze=[freeze] if freeze else [])


def _runs(family: str, freeze: str = "", **degrees: Any) -> Run:
    plan = Plan.uniform(4, precision=DOUBLE, **degrees)
    return merge(run_ranks(plan.world_size, _train, plan, family, freeze))


@cache
def _one_process(family: str) -> Run:
    return _runs(family)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("family", "layout"), [(f, layout) for f, layouts in FAMILIES.items() for layout in layouts]
)
def test_experts_on_several_ranks_are_those_of_one_process(family: str, layout: str) -> None:
    assert_equal_runs(_runs(family, **LAYOUTS[layout]), _one_process(family), 1e-12)


@pytest.mark.parametrize("freeze", ["*.experts.*", "*.gate.weight"])
def test_frozen_experts_or_routers_are_those_of_one_process(freeze: str) -> None:
    found = _runs("mixtral", freeze, dp=2, ep=2, zero=3)
    assert_equal_runs(found, _runs("mixtral", freeze), 1e-12)
