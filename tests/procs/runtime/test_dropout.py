"""Dropout under every layout: the same masks as in one process, hence the same gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from family_samples import family_config
from layouts import DOUBLE, Run, assert_equal_runs, batch_of, make_engine, merge, split, train
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.dropout import Masks, keep

RATES: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.3},
    "gpt_neox": {"hidden_dropout": 0.2},
    "phi3": {"resid_pdrop": 0.2, "attention_dropout": 0.1},
    "starcoder2": {"residual_dropout": 0.2, "embedding_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.2},
    "gpt_oss": {"attention_dropout": 0.1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP x PP2 ZB-H1": {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
    "DP2 x TP2 ZeRO-3": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full", "microbatch": 2},
    "CP4": {"cp": 4},
    "CP2 Ulysses x PP2": {"cp": 2, "pp": 2, "context_method": "ulysses"},
    "CP2 x TP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"},
}


def _config(family: str) -> dict[str, Any]:
    return {**family_config(family), **RATES[family]}


def _train(plan: Plan, family: str) -> Run:
    def body() -> Run:
        return train(plan, _config(family), sequences=4, length=16, eps=1e-2)

    return merge(run_ranks(plan.world_size, body))


@cache
def _reference(family: str) -> Run:
    return _train(Plan.uniform(4, precision=DOUBLE, microbatch=4), family)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", "TP2+SP x PP2 ZB-H1"),
        ("gpt2", "DP2 x TP2 ZeRO-3"),
        ("gpt_neox", "CP2 x TP2+SP"),
        ("phi3", "TP2+SP x PP2 ZB-H1"),
        ("starcoder2", "DP2 x TP2 ZeRO-3"),
        ("starcoder2", "TP2+SP x PP2 ZB-H1"),
        ("gemma2", "DP2 x TP2 ZeRO-3"),
        ("gpt2", "CP2 x TP2+SP"),
        ("phi3", "CP2 x TP2+SP"),
        ("phi3", "CP2 Ulysses x PP2"),
        ("gemma2", "CP2 Ulysses x PP2"),
        ("starcoder2", "CP4"),
        ("gpt_oss", "CP4"),
    ],
)
def test_any_layout_drops_what_one_process_drops(family: str, layout: str) -> None:
    plan = Plan.uniform(4, precision=DOUBLE, **LAYOUTS[layout])
    assert_equal_runs(_train(plan, family), _reference(family), 1e-12)


def test_an_evaluation_drops_nothing() -> None:
    def body() -> bool:
        losses = []
        for changes in ({}, dict.fromkeys(RATES["gpt2"], 0.0)):
            plan = Plan.uniform(4, microbatch=2)
            engine = make_engine(plan, {**_config("gpt2"), **changes})
            losses.append(
                engine.evaluate(split(batch_of(0, 2, 16, 512), plan, engine.mesh.coordinates))[0]
            )
        return losses[0] == losses[1]

    assert run_ranks(1, body) == [True]


# ---- masks ------------------------------------------------------------------------------------


def _masks(seed: int = 0, parts: int = 1, part: int = 0, context: int = 1) -> Masks:
    device = torch.device("cpu")
    return Masks(seed, num_parts=parts, part_index=part, context_size=context, device=device)


def _drawn(masks: Masks, first: int = 0, place: str = "here", step: int = 0) -> torch.Tensor:
    masks.step = step
    masks.turn_to(first, 8, None)
    return masks.hidden(place, 0.5, 2, 32)


def test_masks_differ_by_seed_step_sequence_and_place() -> None:
    one = _drawn(_masks())
    assert torch.equal(one, _drawn(_masks()))
    assert not torch.equal(one[0], one[1])
    assert torch.equal(_drawn(_masks(), first=1)[0], one[1])
    others = (_drawn(_masks(1)), _drawn(_masks(), step=1), _drawn(_masks(), place="there"))
    assert not any(torch.equal(one, other) for other in others)


def test_divided_rows_are_parts_of_one_mask() -> None:
    whole = _drawn(_masks())
    parts = [_drawn(_masks(parts=2, part=index)) for index in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    masks = _masks(context=2)
    masks.turn_to(0, 4, torch.tensor([0, 1, 6, 7]))
    assert torch.equal(masks.hidden("here", 0.5, 2, 32), whole[:, [0, 1, 6, 7]])


def test_the_expectation_of_what_stays_is_the_input() -> None:
    masks = _masks()
    masks.turn_to(0, 400, None)
    mask = masks.hidden("here", 0.25, 1, 400)
    assert mask.float().mean() == pytest.approx(0.75, abs=0.01)
    assert keep(torch.ones(1, 400, 400), mask, 0.25).mean() == pytest.approx(1.0, abs=0.01)
    assert not keep(torch.ones(2), torch.tensor([False, False]), 1.0).any()
