"""Llama 4's chunks and its scaling by position begin anew in every packed document."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from family_samples import family_config
from packed import Answer, answer, assert_same, one_by_one, packed

from triptych.plan.plan import Plan

CONFIG = family_config("llama4_text")  # chunks of 8 tokens, a step of the scale every 4
ROWS = ((13, 3, 16), (8, 1, 23))
SPLITS: dict[str, dict[str, Any]] = {
    "CP1": {},
    "CP2": {"cp": 2},
    "CP2 ulysses": {"cp": 2, "context_method": "ulysses"},
    "CP2 EP2 recomputed": {"cp": 2, "ep": 2, "recompute": "full"},
}


@cache
def _separate() -> Answer:
    return answer(Plan.uniform(4), CONFIG, one_by_one(packed(ROWS, 512)))


@pytest.mark.parametrize("split", SPLITS)
def test_packed_documents_are_those_that_stand_alone(split: str) -> None:
    plan = Plan.uniform(4, **SPLITS[split])
    assert_same(answer(plan, CONFIG, [packed(ROWS, 512)]), _separate(), 1e-5)
