"""User case pub_025: with dropout, recomputation changes nothing; masks agree where values do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import batch_of, make_engine, split
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine

CONFIG = {
    **family_config("gpt2"),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1),
}
MODES = ("none", "selective", "full")


def _step(engine: Engine) -> tuple[float, list[torch.Tensor]]:
    rows = batch_of(0, 4, 24, CONFIG["vocab_size"])
    engine.gradients(split(rows, engine.plan, engine.mesh.coordinates))
    gradients = [piece.gradient.clone() for piece in engine.optimizer.pieces]
    return engine.step(split(rows, engine.plan, engine.mesh.coordinates), 1e-2).loss, gradients


def _compare(plan: Plan) -> float:
    """The loss, after a check that it and all gradients are the same in each mode."""
    loss, gradients = _step(make_engine(plan, CONFIG))
    for mode in MODES[1:]:
        again, others = _step(make_engine(plan.with_(recompute=mode), CONFIG))
        assert again == pytest.approx(loss, abs=1e-6)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    return loss


LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "sequence_parallel": True},
)


def test_pub_025_recomputation_is_neutral_and_layouts_agree() -> None:
    plans = [Plan.uniform(4, **settings) for settings in LAYOUTS]
    losses = [loss for plan in plans for loss in run_ranks(plan.world_size, _compare, plan)]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    without = make_loss_without_dropout()
    assert losses[0] != pytest.approx(without, rel=1e-5)


def make_loss_without_dropout() -> float:
    config = {**CONFIG, **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)}
    rows = batch_of(0, 4, 24, CONFIG["vocab_size"])

    def body(plan: Plan) -> float:
        engine = make_engine(plan, config)
        return engine.step(split(rows, plan, engine.mesh.coordinates), 1e-2).loss

    return float(run_ranks(1, body, Plan.uniform(4))[0])


def _zeros(plan: Plan) -> list[torch.Tensor]:
    """Where each hidden state of a fixed input is dropped, module by module, micro-batch by
    micro-batch.
    """
    engine = make_engine(plan, CONFIG)
    seen: list[torch.Tensor] = []
    for name, module in engine.stages[0].causal_lm.named_modules():
        if name.endswith(("resid_dropout", "mlp.dropout")):
            module.register_forward_hook(lambda _, __, output: seen.append(output == 0))
    same = batch_of(0, 1, 24, CONFIG["vocab_size"]) * 4  # every sequence alike
    engine.gradients(split(same, plan, engine.mesh.coordinates))
    return [mask.numpy() for mask in seen]


@pytest.mark.parametrize("settings", [{"dp": 2}, {"tp": 2}], ids=str)
def test_pub_025_masks_differ_between_data_ranks_and_agree_over_tensor_ranks(
    settings: dict[str, int],
) -> None:
    one, other = run_ranks(2, _zeros, Plan.uniform(4, **settings))
    assert len(one) == len(other) == 8 * (4 // settings.get("dp", 1))
    for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert 0 < mine.mean() < 0.3
        assert (mine == theirs).all() == ("tp" in settings), index
    assert not (one[0] == one[8]).all()  # the next micro-batch, of the same tokens
