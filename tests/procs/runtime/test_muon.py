"""Muon on whole matrices: the library's update, the same under every layout that leaves them whole.

In fp64: Newton-Schulz steps run in bf16, which hides a difference in the last digits of a gradient
or makes it large.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import DOUBLE, Run, assert_equal_runs, batch_of, make_engine, merge, split, train
from ranks import run_ranks

from triptych.errors import PlanError
from triptych.plan.plan import Plan
from triptych.runtime.engine import OptimizerSettings

MUON: dict[str, Any] = {"name": "muon", "eps": 1e-2}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"dp": 4, "ep": 2, "zero": 1, "bucket_bytes": 4096}),
    ("mixtral", {"dp": 2, "ep": 2, "pp": 2}),
    ("llama tied", {"cp": 2, "pp": 2, "zero": 1, "schedule": "zb-h2"}),  # updates may be put back
    ("llama tied", {"dp": 4, "zero": 1, "hybrid_shard": 2, "offload": "optimizer"}),
]


def _train(plan: Plan, family: str) -> Run:
    return train(plan, family_config(family), **MUON)


@cache
def _one_process(family: str) -> Run:
    return merge(run_ranks(1, _train, Plan.uniform(4, precision=DOUBLE), family))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("family", "settings"), LAYOUTS, ids=str)
def test_every_layout_gives_one_process(family: str, settings: dict[str, Any]) -> None:
    plan = Plan.uniform(4, precision=DOUBLE, **settings)
    found = merge(run_ranks(plan.world_size, _train, plan, family))
    assert_equal_runs(found, _one_process(family), 1e-12)
    matrix, table = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
    kinds = {kind for kind, name in found.tensors if name == matrix}
    assert kinds == {"gradient", "weight", "exp_avg"}
    assert ("exp_avg_sq", table) in found.tensors


def test_a_step_is_that_of_the_library() -> None:
    def body() -> None:
        plan, config = Plan.uniform(4), family_config("llama")
        engine = make_engine(plan, config, clip_norm=0.0, **MUON)
        rows = split(batch_of(0, 4, 24, 512), plan, engine.mesh.coordinates)
        engine.gradients(rows)
        expected = {}
        for slot in engine.buckets.slots:
            if slot.is_matrix:
                weights = slot.value.clone().requires_grad_()
                weights.grad = slot.gradient.clone()
                torch.optim.Muon([weights], lr=1e-2, adjust_lr_fn="match_rms_adamw").step()
                expected[slot.name] = weights.detach()
        assert len(expected) == 4 * 7
        engine.step(rows, 1e-2)
        found = {slot.name: slot.value for slot in engine.buckets.slots}
        for name, weights in expected.items():
            torch.testing.assert_close(found[name], weights, msg=name)

    run_ranks(1, body)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    def body() -> None:
        plan, config = Plan.uniform(4), family_config("llama")
        engine = make_engine(plan, config, **MUON)
        rows = split(batch_of(0, 4, 24, 512), plan, engine.mesh.coordinates)
        engine.step(rows, 1e-2)
        before = [shard.tensor.clone() for shard in engine.shards()]
        engine.gradients(rows)
        engine.optimizer.pieces[0].gradient[0] = torch.inf
        engine.optimizer.step(1e-2, engine.optimizer.squared_norm().sqrt())
        assert all(map(torch.equal, before, (shard.tensor for shard in engine.shards())))

    run_ranks(1, body)


def test_zero_1_deals_whole_matrices_evenly() -> None:
    def body(plan: Plan) -> int:
        engine = make_engine(plan, family_config("llama"), **MUON)
        pieces = [piece for piece in engine.optimizer.pieces if piece.slot.is_matrix]
        assert all((p.start, p.stop) == (0, p.slot.elements) for p in pieces)
        padding = sum(b.elements - sum(s.elements for s in b.slots) for b in engine.buckets.buckets)
        assert padding < sum(slot.elements for slot in engine.buckets.slots) / 4
        return sum(piece.slot.elements for piece in pieces)

    plan = Plan.uniform(4, dp=4, zero=1)
    dealt = run_ranks(4, body, plan)
    assert sum(dealt) == 4 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 160)
    assert max(dealt) < 1.3 * sum(dealt) / 4


def test_matrices_that_are_cut_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        OptimizerSettings(**MUON).require_possible(Plan.uniform(4, tp=2, dp=2, zero=3))
    text = str(error.value)
    assert "optimizer=muon with tp=2" in text and "tp=1" in text
    assert "optimizer=muon with zero=3" in text and "zero=1" in text
