"""What computing is spent on adds up to the computing of a rank."""

from __future__ import annotations

from typing import Any

import pytest
from cost_samples import cluster, frame_of, llama, plan

from triptych.cost.work import rank_work
from triptych.model.model import Experts

MODEL = llama(layers=8, hidden=1024, heads=16, kv_heads=8, width=4096, vocab=32_000)


@pytest.mark.parametrize(
    "settings",
    [{}, {"compile": True}, {"recompute": "full", "recompute_every": 2}, {"tp": 2, "pp": 4}],
)
def test_parts_of_the_work_are_what_a_rank_computes(settings: dict[str, Any]) -> None:
    frame = frame_of(MODEL, plan(MODEL, **settings))
    for rank in range(frame.num_ranks):
        costs = [frame.costs[stage] for stage in frame.stages_of(rank)]
        computed_s = sum(c.forward.compute_s + c.backward.compute_s for c in costs)
        work = rank_work(frame, rank)
        assert sum(work) == pytest.approx(computed_s)
        assert min(work) > 0.0


def test_recomputation_is_more_attention() -> None:
    plain, again = (
        rank_work(frame_of(MODEL, plan(MODEL, recompute=word)), 0) for word in ("none", "full")
    )
    assert 1.2 * plain.attention_s < again.attention_s < 1.5 * plain.attention_s


def test_experts_move_more_than_a_dense_mlp() -> None:
    experts = llama(layers=8, hidden=1024, experts=Experts(count=8, top_k=2, width=2048))
    dense = llama(layers=8, hidden=1024, width=4096)
    moved = [
        rank_work(frame_of(model, plan(model), cluster(1)), 0).memory_s
        for model in (experts, dense)
    ]
    assert moved[0] > moved[1]
