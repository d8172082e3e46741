"""PUB-078: nothing is dropped, or what is dropped is counted and passes by the residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_samples import VOCAB, all_to_the_first, gradients_of, mixture, stock
from layouts import batch_of, make_engine
from ranks import run_ranks

from triptych.errors import PlanError
from triptych.plan.plan import Plan
from triptych.runtime.engine import RouterSettings

CONFIG = mixture() | {"num_experts_per_tok": 1}
SEQUENCES, EXPERTS, LAYERS = 4, 4, 2


def _stock_loss(weights: dict[str, torch.Tensor], length: int, kept: int) -> tuple[float, Any]:
    """The stock model in which only the first `kept` tokens of a sequence see experts."""
    model, _ = stock(CONFIG, weights)

    def drop(_: Any, __: Any, output_BSH: torch.Tensor) -> torch.Tensor:
        return output_BSH * (torch.arange(length) < kept)[:, None]

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(drop)
    rows = batch_of(0, SEQUENCES, length, VOCAB)
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return float(loss.detach()), model.model.embed_tokens.weight.grad


@pytest.mark.parametrize("length", [16, 1])
@pytest.mark.parametrize("factor", [None, 2.0, 0.1])
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}], ids=str)
def test_all_tokens_to_one_expert(layout: Any, factor: float | None, length: int) -> None:
    plan, router = Plan.uniform(LAYERS, **layout), RouterSettings(capacity_factor=factor)

    def body() -> Any:
        return gradients_of(
            plan, CONFIG, router, sequences=SEQUENCES, length=length, change=all_to_the_first
        )

    found = run_ranks(plan.world_size, body)
    weights = {name: value for rank in found for name, value in rank["weights"].items()}
    kept = {None: length, 2.0: -(-length * 2 // EXPERTS), 0.1: 1}[factor]
    expected, embedding = run_ranks(1, _stock_loss, weights, length, kept)[0]
    for rank in found:
        assert rank["loss"] == pytest.approx(expected, rel=1e-5)
        assert rank["router"].dropped_tokens == LAYERS * SEQUENCES * (length - kept)
        for name, gradient in rank["gradients"].items():
            assert gradient.isfinite().all(), name
            if "experts" in name and ".experts.0." not in name:
                assert not gradient.any(), name
        torch.testing.assert_close(
            rank["gradients"]["model.embed_tokens.weight"], embedding, rtol=1e-5, atol=1e-5
        )


def test_a_capacity_is_refused_where_no_rank_sees_a_whole_sequence() -> None:
    def body() -> str:
        with pytest.raises(PlanError) as error:
            make_engine(Plan.uniform(2, cp=2), CONFIG, RouterSettings(capacity_factor=1.0))
        return str(error.value)

    text = run_ranks(2, body)[0]
    assert "capacity_factor = 1.0 with cp=2" in text and "cp=1" in text
