"""Bytes of a step under ZeRO, hybrid shards and accumulation: the law, by counters and kernel."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import STRICT
from test_wire_bytes import HEADERS, HIDDEN, LAYERS, SEQUENCES, VOCAB, WIDTH, in_own_network

from triptych.plan.plan import Plan

LAYER = HIDDEN * HIDDEN * 2 + HIDDEN * (HIDDEN // 8 * 2) * 2 + 3 * HIDDEN * WIDTH + 2 * HIDDEN
ENDS = 2 * VOCAB * HIDDEN
ELEMENTS = LAYERS * LAYER + ENDS + HIDDEN


def _law(plan: Plan) -> tuple[float, float]:
    """fp32 bytes of the data axis over all ranks: at most by domain.md section 2, and exactly.

    For each micro-batch of g: gather for the forward, gather for the backward, scatter: 3 g Psi.
    We gather less: embedding and head once, what is still whole not at all.
    """
    shards = plan.shards_of(plan.stages[0])
    replicas = plan.dp // shards
    rounds = SEQUENCES // (plan.microbatch * plan.dp)
    reduced = ELEMENTS * (rounds if plan.reduces_each else 1)
    spread = most_spread = float(ELEMENTS)
    if plan.zero == 3:
        most_spread = 2.0 * rounds * ELEMENTS
        spread = rounds * (ENDS + 2 * LAYERS * LAYER + 2 * HIDDEN)
        spread -= rounds * (LAYER + HIDDEN) + (rounds - 1) * LAYER  # the last, and the first
    across = 2 * (replicas - 1) * ELEMENTS  # an all-reduce of every shard
    inside = (shards - 1) * replicas
    return 4 * (inside * (reduced + most_spread) + across), 4 * (
        inside * (reduced + spread) + across
    )


@pytest.mark.sweep(3)
@pytest.mark.skipif(STRICT, reason="strict communication sends acknowledgements and checksums")
@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 2, "accumulation": "reduce_last"},
        {"dp": 4, "zero": 2},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "microbatch": 2},
        {"dp": 2, "zero": 3, "accumulation": "reduce_last"},
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 1, "hybrid_shard": 2},
        {"dp": 4, "zero": 3, "hybrid_shard": 2},
    ],
    ids=str,
)
def test_the_data_axis_carries_what_the_law_says(settings: dict[str, Any]) -> None:
    plan = Plan.uniform(LAYERS, **settings)
    answers = in_own_network(plan)
    most, exact = _law(plan)
    counted = sum(sent["data"] for _, sent in answers)
    kernel = max(seen for seen, _ in answers)
    print(f"{plan.short()}: kernel {kernel} B, exact x {kernel / exact:.4f}, law {most:.0f} B")
    assert counted == pytest.approx(exact, rel=0.005, abs=2000)
    assert kernel <= (1 + HEADERS) * exact
    assert exact <= most
