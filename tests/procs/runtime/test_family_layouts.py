"""Every family under a layout is one process: to the last digit in fp64, closely in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import UNEVEN, family_config
from layouts import DOUBLE, Run, assert_equal_runs, merge, train
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision

FAMILIES = [name for name in UNEVEN if name not in ("llama", "qwen3")]
ROUNDS_TO_FP32 = ("cohere norms",)  # the library's own rotary embedding and norms do


def _train(plan: Plan, config: dict[str, Any]) -> Run:
    # A key's bias has no gradient but noise, which Adam's usual eps would magnify.
    return train(plan, config, eps=1e-2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ROUNDS_TO_FP32])
def test_two_steps_on_four_ranks_are_those_of_one_process_in_fp64(family: str) -> None:
    config = family_config(family, uneven=True)
    one = merge(run_ranks(1, _train, Plan.uniform(4, precision=DOUBLE), config))
    plan = Plan.uniform(4, precision=DOUBLE, tp=2, pp=2, sequence_parallel=True)
    assert_equal_runs(merge(run_ranks(4, _train, plan, config)), one, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision_on_four_ranks_stays_close_to_one_process(family: str) -> None:
    config = family_config(family, uneven=True)
    mixed = Precision.mixed()
    one = merge(run_ranks(1, train, Plan.uniform(4, precision=mixed), config))
    plan = Plan.uniform(4, precision=mixed, tp=2, pp=2, sequence_parallel=True)
    found = merge(run_ranks(4, train, plan, config))
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(one.losses), rtol=5e-3, atol=5e-3
    )
