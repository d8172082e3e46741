"""PUB-075: auxiliary losses are as strong in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from family_samples import family_config
from layouts import DOUBLE, Run, assert_equal_runs, merge, train
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import RouterSettings

ROUTER = RouterSettings(aux_loss=0.05, z_loss=0.03)
LAYOUTS: dict[str, dict[str, Any]] = {
    "accumulation 1": {"microbatch": 4},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "CP2": {"cp": 2},
    "CP2 EP2": {"cp": 2, "ep": 2},
    "DP2": {"dp": 2},
    "DP2 EP2": {"dp": 2, "ep": 2},
    "PP2 recomputed": {"pp": 2, "recompute": "full"},
    "PP2 DP2 EP2 ZeRO-2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
}


def _train(plan: Plan, config: dict[str, Any]) -> Run:
    """Labels are trained or not at random: micro-batches have unequal counts of tokens."""
    return train(plan, config, eps=1e-2, router=ROUTER)


def _run(**degrees: Any) -> Run:
    plan = Plan.uniform(4, precision=DOUBLE, **degrees)
    config = family_config("qwen3_moe unnormed")
    return merge(run_ranks(plan.world_size, _train, plan, config))


@cache
def _one_process() -> Run:
    return _run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_that_of_one_process(layout: str) -> None:
    assert_equal_runs(_run(**LAYOUTS[layout]), _one_process(), 1e-12)
