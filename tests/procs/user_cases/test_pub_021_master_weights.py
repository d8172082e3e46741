"""User case pub_021: bf16 weights over fp32 masters and moments, in memory, on disk, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import whole_tensors
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks

from triptych.checkpoint.read import load
from triptych.checkpoint.write import save
from triptych.plan.families import is_norm
from triptych.plan.plan import Plan, Precision
from triptych.runtime.engine import Engine

CONFIG = tiny_config(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)
STEPS, RATE = 200, 1e-5
KINDS = ("master", "exp_avg", "exp_avg_sq")


def _trained(plan: Plan) -> tuple[Engine, float]:
    """200 steps at a rate far below what bf16 can add to a weight of 1, and the last loss."""
    engine = make_engine(plan, CONFIG, weight_decay=0.0)
    batch = split(batch_of(0, 2, 8, CONFIG["vocab_size"]), plan, engine.mesh.coordinates)
    loss = 0.0
    for _ in range(STEPS):
        loss = engine.step(batch, RATE).loss
    return engine, loss


def _moved(engine: Engine, kind: str) -> float:
    """The share of this rank's norm weights, 1.0 at first, that are something else now."""
    norms = [s.tensor.flatten() for s in engine.shards() if s.kind == kind and is_norm(s.name)]
    return float((torch.cat(norms) != 1.0).float().mean()) if norms else 1.0


def _save_and_resume(engine: Engine, folder: Path) -> None:
    """The fp32 values come back bit by bit: rounded weights could not give them."""
    where = save(folder, STEPS, engine.shards(), {})
    again = make_engine(engine.plan, CONFIG)
    load(where, again.shards())
    for mine, theirs in zip(again.shards(), engine.shards(), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), (mine.kind, mine.name)


def test_pub_021_masters_and_moments_are_fp32_and_every_norm_moves(tmp_path: Path) -> None:
    def body() -> list[float]:
        losses = []
        for zero in (0, 1, 2, 3):
            plan = Plan.uniform(2, dp=2, zero=zero, precision=Precision.mixed())
            engine, loss = _trained(plan)
            kinds = {s.tensor.dtype: s.kind == "weight" for s in engine.shards()}
            assert kinds == {torch.float32: False, torch.bfloat16: True}
            assert _moved(engine, "master") >= 0.95
            _save_and_resume(engine, tmp_path / str(zero))
            losses.append(loss)
        return losses

    losses, _ = run_ranks(2, body)
    (exact,) = run_ranks(1, lambda: _trained(Plan.uniform(2))[1])
    assert losses == pytest.approx([exact] * 4, rel=0.02)
    for folder in tmp_path.iterdir():
        stored = whole_tensors(next(folder.iterdir()))
        assert {t.dtype for (kind, _), t in stored.items() if kind in KINDS} == {torch.float32}


def test_pub_021_without_masters_the_norms_stay_where_they_are() -> None:
    """What is to be avoided: the very rate above is lost in the rounding of bf16."""

    def body(precision: Precision) -> float:
        engine, _ = _trained(Plan.uniform(2, precision=precision))
        return _moved(engine, "weight")

    pure: dict[str, Any] = dict.fromkeys(("parameter", "gradient", "master", "moments"), "bf16")
    assert run_ranks(1, body, Precision(**pure)) == [0.0]
