"""User case PUB-031: each parameter counts once in the norm, so that clipping bites alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from layouts import Run, assert_equal_runs, merge, tiny_config, train
from ranks import run_ranks

from triptych.plan.plan import Plan

LAYOUTS = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "sequence_parallel": True},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
]


@cache
def clipped(tied: bool, **settings: Any) -> Run:
    """One step at rate 0: the first moments are the clipped gradients but for a factor."""

    def body(plan: Plan) -> Run:
        config = tiny_config(tie_word_embeddings=tied)
        return train(
            plan, config, steps=1, gradients=False, learning_rate=0.0, clip_norm=0.5, betas=(0, 0)
        )

    plan = Plan.uniform(4, microbatch=2, **settings)
    return merge(run_ranks(plan.world_size, body, plan))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_pub_031_norm_and_clipped_gradients_are_those_of_one_process(
    settings: dict[str, Any], tied: bool
) -> None:
    ours, reference = clipped(tied, **settings), clipped(tied)
    assert ours.norms[0] == pytest.approx(reference.norms[0], rel=1e-6)
    assert reference.norms[0] > 0.5, "clipping must bite"
    squares = [
        float(tensor.double().square().sum())
        for (kind, _), tensor in reference.tensors.items()
        if kind == "exp_avg"
    ]
    assert sum(squares) ** 0.5 == pytest.approx(0.5, rel=1e-3)
    assert_equal_runs(ours, reference, 1e-6)
