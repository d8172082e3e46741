"""Context ranks beside every other axis = one process, for windows and bent scores too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import DOUBLE, Run, assert_equal_runs, merge, train
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision

FAMILIES = ("llama", "mistral window", "gemma2", "gemma3_text", "starcoder2", "gpt_oss")
ULYSSES = {"context_method": "ulysses"}
THREE = {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True}
MORE: dict[str, dict[str, Any]] = {
    "CP4 ulysses, two ranks a KV head": {**ULYSSES, "cp": 4},
    "CP2 ulysses x DP2 ZeRO-3 recompute": {
        **ULYSSES,
        "cp": 2,
        "dp": 2,
        "zero": 3,
        "recompute": "full",
    },
    "CP2 x DP2 ZeRO-2": {"cp": 2, "dp": 2, "zero": 2},
    "CP2 x PP2 zb-v": {"cp": 2, "pp": 2, "schedule": "zb-v", "chunks": 2, "microbatch": 1},
    "CP2 x TP4, copied KV heads": {"cp": 2, "tp": 4},
}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_mixed_precision_on_context_ranks_stays_close_to_one_process(method: str) -> None:
    plan = Plan.uniform(4, cp=2, context_method=method, precision=Precision.mixed())
    one = Plan.uniform(4, precision=Precision.mixed())
    found, expected = (merge(run_ranks(p.world_size, _train, p, "gemma2")) for p in (plan, one))
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=5e-3, atol=5e-3
    )


def _train(plan: Plan, family: str) -> Run:
    return train(plan, family_config(family), eps=1e-2, clip_norm=0.0)


@cache
def _one_process(family: str) -> Run:
    return merge(run_ranks(1, _train, Plan.uniform(4, precision=DOUBLE), family))


def _assert_one_process(family: str, settings: dict[str, Any]) -> None:
    plan = Plan.uniform(4, precision=DOUBLE, **{"microbatch": 2, **settings})
    found = merge(run_ranks(plan.world_size, _train, plan, family))
    assert_equal_runs(found, _one_process(family), 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_a_ring_beside_tensor_and_pipeline_ranks(family: str) -> None:
    _assert_one_process(family, THREE)


@pytest.mark.parametrize("family", ["mistral window", "gemma2"])
def test_families_with_dealt_heads_beside_tensor_and_pipeline_ranks(family: str) -> None:
    _assert_one_process(family, THREE | ULYSSES)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", MORE)
def test_context_ranks_beside_the_other_axes(layout: str) -> None:
    _assert_one_process("gemma2", MORE[layout])
