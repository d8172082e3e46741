"""The likeliest next token is that of one process, whatever holds it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from layouts import DOUBLE, make_engine, tiny_config
from ranks import run_ranks

from triptych.plan.plan import Plan

PLACES = [5, 0, 11]
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"dp": 2, "zero": 3, "cp": 2},
    {"pp": 2, "chunks": 2, "schedule": "zb-v"},
]


def rows() -> torch.Tensor:
    return torch.randint(512, (3, 12), generator=torch.Generator().manual_seed(3))


def _found(plan: Plan) -> list[int]:
    return make_engine(plan, tiny_config()).next_tokens(rows(), PLACES)


@cache
def _expected() -> tuple[list[int], torch.Tensor]:
    def body() -> tuple[list[int], torch.Tensor]:
        engine = make_engine(Plan.uniform(4, precision=DOUBLE), tiny_config())
        with torch.no_grad():
            logits = engine.stages[0].local_logits(engine.stages[0](rows()))
        best = [int(logits[row, place].argmax()) for row, place in enumerate(PLACES)]
        return engine.next_tokens(rows(), PLACES), torch.tensor(best)

    (found,) = run_ranks(1, body)
    return found


def test_one_process_gives_the_token_with_the_largest_logit() -> None:
    found, best = _expected()
    assert found == best.tolist() and len(set(found)) > 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_that_of_one_process_on_every_rank(layout: dict[str, Any]) -> None:
    plan = Plan.uniform(4, precision=DOUBLE, **layout)
    assert run_ranks(plan.world_size, _found, plan) == [_expected()[0]] * plan.world_size


def test_parameters_named_for_no_decay_have_none() -> None:
    """With a zero gradient only the decay moves a weight."""

    def body() -> dict[str, bool]:
        names = frozenset({"model.embed_tokens.weight"})
        for settings in ({"name": "adamw"}, {"name": "muon"}):
            engine = make_engine(
                Plan.uniform(4), tiny_config(), weight_decay=0.5, no_decay=names, **settings
            )
            before = {slot.name: slot.value.clone() for slot in engine.buckets.slots}
            engine.buckets.begin_step()
            for slot in engine.buckets.slots:
                slot.add(torch.zeros_like(slot.value))
            engine.buckets.finish()
            engine.optimizer.step(0.1, torch.tensor(1.0))
            moved = {s.name: not torch.equal(s.value, before[s.name]) for s in engine.buckets.slots}
            assert not moved["model.embed_tokens.weight"] and not moved["model.norm.weight"]
            assert moved["lm_head.weight"] and moved["model.layers.0.mlp.up_proj.weight"]
        return moved

    run_ranks(1, body)
