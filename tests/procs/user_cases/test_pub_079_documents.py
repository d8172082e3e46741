"""User case PUB-079: context ranks respect the borders of packed documents."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from layouts import DOUBLE, tiny_config
from packed import Answer, answer, assert_same, one_by_one, packed

from triptych.plan.plan import Plan, Precision

# Rows of 64: chunks of a ring are 16 tokens long at CP2 and 8 at CP4, parts of Ulysses 32 and 16.
ROWS = (
    (11, 5, 20, 13, 15),  # borders inside chunks and on their edges, two longer than a chunk
    (8, 8, 16, 16, 16),  # on edges only
    (3, 50, 1, 1, 9),  # one longer than several chunks, and single tokens
)
SPLITS: dict[str, dict[str, Any]] = {
    "CP1": {},
    "CP2": {"cp": 2},
    "CP4": {"cp": 4},
    "CP2 ulysses": {"cp": 2, "context_method": "ulysses"},
    "CP4 ulysses": {"cp": 4, "context_method": "ulysses"},
    "CP2 x TP2+SP x PP2": {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True},
    "CP2 ulysses x DP2 ZeRO-3 recompute": {
        "cp": 2,
        "context_method": "ulysses",
        "dp": 2,
        "zero": 3,
        "recompute": "full",
    },
}


@cache
def _separate(precision: Precision) -> Answer:
    alone = [document for seed in range(2) for document in one_by_one(packed(ROWS, 512, seed))]
    return answer(Plan.uniform(4, precision=precision), tiny_config(), alone)


def _packed(precision: Precision, **settings: Any) -> Answer:
    plan = Plan.uniform(4, precision=precision, **settings)
    return answer(plan, tiny_config(), [packed(ROWS, 512, seed) for seed in range(2)])


@pytest.mark.parametrize("split", SPLITS)
def test_pub_079_loss_and_gradients_are_those_of_separate_documents(split: str) -> None:
    assert_same(_packed(DOUBLE, **SPLITS[split]), _separate(DOUBLE), 1e-12)


@pytest.mark.parametrize("split", ["CP4", "CP4 ulysses"])
def test_pub_079_so_they_are_in_fp32(split: str) -> None:
    assert_same(_packed(Precision(), **SPLITS[split]), _separate(Precision()), 1e-5)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_pub_079_rows_that_do_not_divide_are_padded_behind_the_documents(method: str) -> None:
    rows = ((11, 5, 5), (21,))
    whole = packed(rows, 512)
    expected = answer(Plan.uniform(4, precision=DOUBLE), tiny_config(), one_by_one(whole))
    plan = Plan.uniform(4, cp=2, precision=DOUBLE, context_method=method)
    assert_same(answer(plan, tiny_config(), [whole]), expected, 1e-12)
