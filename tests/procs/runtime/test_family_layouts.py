"""Every family under a layout is one process: to the last digit in fp64, closely in bf16."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from family_samples import UNEVEN, family_config
from layouts import DOUBLE, Run, assert_equal_runs, merge, train
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision

FAMILIES = [name for name in UNEVEN if name not in ("llama", "qwen3")]
ROUNDS_TO_FP32 = ("cohere norms", "llama4_text")  # the library's own rotary embeddings and norms do
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP x PP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "TP2+SP x ZeRO-3": {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
}


def _train(plan: Plan, family: str) -> Run:
    # A key's bias has no gradient but noise, which Adam's usual eps would magnify.
    return train(plan, family_config(family, uneven=True), eps=1e-2)


def _runs(family: str, precision: Precision, **degrees: Any) -> Run:
    plan = Plan.uniform(4, precision=precision, microbatch=2, **degrees)
    return merge(run_ranks(plan.world_size, _train, plan, family))


@cache
def _one_process(family: str, precision: Precision) -> Run:
    return _runs(family, precision)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_on_four_ranks_are_those_of_one_process(family: str, layout: str) -> None:
    wide = family not in ROUNDS_TO_FP32
    precision, tolerance = (DOUBLE, 1e-12) if wide else (Precision(), 1e-5)
    found = _runs(family, precision, **LAYOUTS[layout])
    assert_equal_runs(found, _one_process(family, precision), tolerance)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision_on_four_ranks_stays_close_to_one_process(family: str) -> None:
    found = _runs(family, Precision.mixed(), **LAYOUTS["TP2+SP x PP2"])
    expected = _one_process(family, Precision.mixed())
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=5e-3, atol=5e-3
    )
