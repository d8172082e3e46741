"""One product for all experts of a layer gives what one expert after the other does.

The library's grouped product runs on CPU in fp32 too, where nothing chooses it: here it is forced.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import Run, assert_equal_runs, merge, train
from ranks import run_ranks
from torch.nn import functional

import triptych.runtime.parts as parts
from triptych.plan.plan import Plan
from triptych.runtime.expert.balance import RouterSettings
from triptych.runtime.expert.grouped import kernel_for

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", {}, {"dp": 2, "zero": 3, "recompute": "full"}),
    ("mixtral", {"freeze": ["model.layers.*.experts.*.w1"]}, {"tp": 2}),  # the gates are frozen
    ("gpt_oss", {}, {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-h1"}),  # biases
    ("llama4_text", {}, {"dp": 2, "ep": 2, "zero": 1}),
    ("qwen3_moe", {"router": RouterSettings(capacity_factor=0.5)}, {}),  # some rows go nowhere
]


def _both(plan: Plan, family: str, more: dict[str, Any]) -> tuple[int, Run, Run]:
    """How often a grouped product ran, and what training gave without and with it."""
    calls = 0

    def kernel(*operands: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return functional.grouped_mm(*operands, offs=offs)

    config = family_config(family)
    settings = {"eps": 1e-2, **more}
    plain = train(plan, config, **settings)
    parts.kernel_for = lambda *_: kernel  # type: ignore[assignment]
    run = train(plan, config, **settings)
    return calls, plain, run


@pytest.mark.parametrize(("family", "more", "settings"), CASES, ids=str)
def test_a_grouped_product_is_one_expert_after_the_other(
    family: str, more: dict[str, Any], settings: dict[str, Any]
) -> None:
    plan = Plan.uniform(4, bucket_bytes=4096, **settings)  # less than one expert has
    calls, plain, grouped = zip(*run_ranks(plan.world_size, _both, plan, family, more), strict=True)
    layers = {"llama4_text": 2, "gpt_oss": 2, "qwen3_moe": 3, "mixtral": 4}[family]  # of a rank
    assert min(calls) >= 3 * 2 * layers  # three products, and one more of each in a backward
    assert_equal_runs(merge(grouped), merge(plain), 1e-5)


def test_only_bf16_on_a_gpu_has_a_grouped_product() -> None:
    assert kernel_for(torch.device("cpu"), torch.bfloat16) is None
    assert kernel_for(torch.device("cuda"), torch.float32) is None
    assert kernel_for(torch.device("cuda"), torch.bfloat16) is functional.grouped_mm
