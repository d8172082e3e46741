"""User case PUB-015: the loss that is logged weighs every token alike, however a batch is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import Run, make_engine, merge, tiny_config
from ranks import run_ranks
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from triptych.plan.plan import Plan
from triptych.runtime.engine import MicroBatch

TRAINED = (3, 11, 101, 5, 64, 7, 1, 40)
CUTS = {
    "1x8": (Plan.uniform(4, microbatch=8), 1),
    "4x2": (Plan.uniform(4, microbatch=2), 4),
    "DP2": (Plan.uniform(4, dp=2, microbatch=4), 1),
    "DP2 x 2": (Plan.uniform(4, dp=2, microbatch=2), 2),
    "PP2 x 4": (Plan.uniform(4, pp=2, microbatch=2), 4),
}


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each sequence, without padding."""
    draws = torch.Generator().manual_seed(11)
    return [
        (
            torch.randint(512, (count,), generator=draws),
            torch.randint(512, (count,), generator=draws),
        )
        for count in TRAINED
    ]


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> MicroBatch:
    ids = torch.zeros(len(rows), max(TRAINED), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, targets) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(targets)] = targets
    return MicroBatch(ids, labels)


def step(plan: Plan, count: int) -> Run:
    """One step; the weights before it, and the loss as the metrics file gets it."""
    engine = make_engine(plan, tiny_config())
    pieces = [
        (s.kind, s.name, s.shape, s.box, s.tensor.detach().clone().numpy()) for s in engine.shards()
    ]
    share = len(TRAINED) // plan.dp
    mine = sequences()[engine.mesh.coordinates.dp * share :][:share]
    parts = [padded(mine[i : i + share // count]) for i in range(0, share, share // count)]
    run = Run(losses=[engine.step(parts, 0.0).loss])
    run.tensors.update({("pieces", ""): pieces})  # type: ignore[dict-item]
    return run


def stock_sums(run: Run) -> list[float]:
    """The summed loss of each sequence, alone and without padding, by the stock library."""
    settings = {key: value for key, value in tiny_config().items() if key != "model_type"}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
    weights = {name: value for (kind, name), value in run.tensors.items() if kind == "weight"}
    model.load_state_dict(weights)
    with torch.no_grad():
        return [
            float(functional.cross_entropy(model(ids[None]).logits[0], labels, reduction="sum"))
            for ids, labels in sequences()
        ]


@pytest.mark.parametrize("cut", CUTS)
def test_pub_015_the_logged_loss_is_the_mean_over_tokens_in_every_cut(cut: str) -> None:
    """The gradients of these cuts are compared in the runtime's tests."""
    plan, count = CUTS[cut]
    run = merge(run_ranks(plan.world_size, step, plan, count))
    sums = stock_sums(run)
    by_token = sum(sums) / sum(TRAINED)
    by_sequence = sum(s / n for s, n in zip(sums, TRAINED, strict=True)) / len(TRAINED)
    assert run.losses[0] == pytest.approx(by_token, abs=1e-5)
    assert abs(by_sequence - by_token) > 1e-2, "the two means must differ for this test to tell"
