"""Our routers for fp64 choose and weigh as the library's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from family_samples import FAMILIES, family_config
from ranks import run_ranks

from triptych.plan.families import FAMILIES as ROWS
from triptych.runtime.build.wide import widen

ROW_OF = {name: ROWS[family_config(name)["model_type"]] for name in FAMILIES}
# GPT-OSS's own does not round, Llama 4's is replaced in every dtype: neither is widened.
CASES = [name for name, row in ROW_OF.items() if row.experts is not None and row.router == "gate"]


@pytest.mark.parametrize("case", CASES)
def test_a_wide_router_gives_what_the_stock_one_gives(case: str) -> None:
    def body() -> Any:
        settings = family_config(case)
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
        gate = model.model.layers[3].mlp.gate
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias.uniform_(-0.3, 0.3)
        hidden = torch.randn(2, 20, config.hidden_size)
        widen(model)
        wide = model.model.layers[3].mlp.gate
        return type(gate) is type(wide), [sorted_by_expert(*r(hidden)) for r in (gate, wide)]

    is_same_kind, (stock, ours) = run_ranks(1, body)[0]
    assert not is_same_kind
    for expected, found in zip(stock, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def sorted_by_expert(
    logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = experts.argsort(-1)
    return logits, weights.gather(-1, order), experts.gather(-1, order)
