"""PUB-074: the balancing loss reaches the router, times its coefficient."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from expert_samples import GATE, VOCAB, gradients_of, mixture, set_weights, stock
from layouts import batch_of, make_engine, split
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import RouterSettings

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP1": {},
    "EP1 recomputed": {"recompute": "full"},
    "EP2": {"dp": 2, "ep": 2},
    "EP2 recomputed": {"dp": 2, "ep": 2, "recompute": "full"},
}


def _plain_balance(logits: Any, trained_BS: torch.Tensor) -> torch.Tensor:
    """The loss of the documentation, sequence by sequence, in plain PyTorch."""
    total = torch.zeros(())
    for layer in logits:
        for sequence, trained in zip(layer.view(*trained_BS.shape, -1), trained_BS, strict=True):
            probability = sequence[trained].softmax(-1)
            chosen = torch.zeros_like(probability)
            chosen.scatter_(1, probability.topk(2).indices, 1.0)
            share = chosen.mean(0) / 2
            total = total + trained.sum() * 4 * (share * probability.mean(0)).sum()
    return total / trained_BS.sum()


def _reference(aux: float, z: float) -> tuple[dict[str, torch.Tensor], float]:
    """Router gradients, and the load-balancing loss, of the stock library's model."""
    config = mixture()
    engine = make_engine(Plan.uniform(2), config)
    model, parameters = stock(config, {slot.name: slot.value for slot in engine.buckets.slots})
    rows = batch_of(0, 4, 16, VOCAB)
    ids, labels = (torch.stack([row[i] for row in rows]) for i in (0, 1))
    output = model(input_ids=ids, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    balance = aux * _plain_balance(output.router_logits, labels != -100)
    trained = (labels != -100).flatten()
    squares = sum((layer.logsumexp(-1).square() * trained).sum() for layer in output.router_logits)
    (loss + balance + z * squares / trained.sum()).backward()
    return {n: p.grad for n, p in parameters.items() if n.endswith(GATE)}, float(balance.detach())


@cache
def _expected(aux: float, z: float) -> Any:
    return run_ranks(1, _reference, aux, z)[0]


def _step(layout: dict[str, Any], aux: float, z: float = 0.0) -> dict[str, Any]:
    plan = Plan.uniform(2, **layout)
    router = RouterSettings(aux_loss=aux, z_loss=z)
    found = run_ranks(plan.world_size, gradients_of, plan, mixture(), router)[0]
    routers = {n: g for n, g in found["gradients"].items() if n.endswith(GATE)}
    return {**found, "gradients": routers}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_router_gradient_has_the_coefficient_times_that_of_the_loss(layout: str) -> None:
    none, one, two = (_step(LAYOUTS[layout], aux) for aux in (0.0, 0.01, 0.02))
    plain, expected = _expected(0.0, 0.0), _expected(0.01, 0.0)
    assert none["loss"] == one["loss"] == two["loss"]
    for name, bare in none["gradients"].items():
        once, twice = (found["gradients"][name] - bare for found in (one, two))
        assert once.abs().max() > 1e-4
        torch.testing.assert_close(twice, 2 * once, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(bare, plain[0][name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(once, expected[0][name] - plain[0][name], rtol=1e-5, atol=1e-6)
    assert one["router"].aux_loss == pytest.approx(expected[1], rel=1e-5)
    assert two["router"].aux_loss == pytest.approx(2 * expected[1], rel=1e-5)
    assert none["router"].aux_loss == 0.0


def test_the_z_loss_reaches_the_router() -> None:
    found = _step(LAYOUTS["EP2"], 0.01, z=0.02)
    for name, gradient in _expected(0.01, 0.02)[0].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-6)
    assert found["router"].z_loss > 0.01


def test_a_config_that_asks_for_router_logits_has_its_own_coefficient() -> None:
    config = mixture(output_router_logits=True, router_aux_loss_coef=0.01)
    found = run_ranks(1, gradients_of, Plan.uniform(2), config)[0]
    assert found["router"].aux_loss == pytest.approx(_expected(0.01, 0.0)[1], rel=1e-5)
    assert run_ranks(1, gradients_of, Plan.uniform(2), mixture())[0]["router"].aux_loss == 0.0


def test_three_hundred_steps_lower_the_imbalance_of_a_skewed_router() -> None:
    def skew(name: str, weight: torch.Tensor) -> None:
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 0.5
        if name.endswith(GATE):
            weight[0, 0] = 1.0

    def body(aux: float) -> list[float]:
        plan = Plan.uniform(2)
        engine = make_engine(plan, mixture(), RouterSettings(aux_loss=aux), weight_decay=0.0)
        set_weights(engine, skew)
        at = engine.mesh.coordinates
        found = []
        for step in range(300):
            result = engine.step(split(batch_of(step, 2, 16, VOCAB), plan, at), 1e-3)
            assert result.router is not None
            found.append(result.router.aux_loss / aux / 2)  # a layer's; 1 when even
        return found

    weak, strong = (run_ranks(1, body, aux)[0] for aux in (1e-6, 0.1))
    assert strong[0] == pytest.approx(weak[0]) and strong[0] > 1.2
    assert strong[-1] < 1.1 < weak[-1]
