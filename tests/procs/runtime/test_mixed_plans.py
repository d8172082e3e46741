"""Forty plans drawn from the legal ones, up to 8 ranks, each equal to one process."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from layouts import DOUBLE, Run, assert_equal_runs, merge, tiny_config, train
from ranks import run_ranks

from triptych.model.hf import from_config
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS

LAYERS, LENGTH, SEQUENCES, COUNT = 8, 32, 8, 40
MODELS: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": LAYERS},
    {"num_hidden_layers": LAYERS, "tie_word_embeddings": True, "vocab_size": 503},
    {"num_hidden_layers": LAYERS, "model_type": "qwen3", "head_dim": 16},
    {"num_hidden_layers": LAYERS, "model_type": "qwen2", "tie_word_embeddings": True},
    {
        **{"num_hidden_layers": LAYERS, "model_type": "mixtral", "intermediate_size": 48},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
)


def _draw(generator: random.Random) -> tuple[int, Plan]:
    """A model and a legal plan of 2 to 8 ranks that runs."""
    workload = Workload(sequence_length=LENGTH, global_batch=SEQUENCES)
    while True:
        schedule = generator.choice(list(TRAITS))
        model_index = generator.randrange(len(MODELS))
        model = from_config(tiny_config(**MODELS[model_index]), name="tiny")
        settings: dict[str, Any] = {
            "tp": generator.choice((1, 2, 4)),
            "pp": generator.choice((1, 2, 3, 4)),
            "dp": generator.choice((1, 2, 4)),
            "cp": generator.choice((1, 1, 2)),
            "ep": generator.choice((1, 2, 4)) if model.experts else 1,
            "zero": generator.choice((0, 1, 2, 3)),
            "schedule": schedule,
            "chunks": max(TRAITS[schedule].least_chunks, 1),
            "microbatch": generator.choice((1, 2)),
            "recompute": generator.choice(("none", "full")),
            "bucket_bytes": generator.choice((20_000, 1 << 25)),
            "context_method": generator.choice(("ring", "ulysses")),
        }
        settings["sequence_parallel"] = settings["tp"] > 1 and generator.random() < 0.7
        if settings["pp"] * settings["chunks"] > LAYERS:
            continue
        plan = Plan.uniform(LAYERS, precision=DOUBLE, **settings)
        if not 2 <= plan.world_size <= 8 or SEQUENCES % (plan.dp * plan.microbatch):
            continue
        if not verify(plan, model, None, workload) and not unrunnable(plan, model):
            return model_index, plan


def _drawn() -> list[Any]:
    generator = random.Random(20)
    drawn = [_draw(generator) for _ in range(COUNT)]
    return [
        pytest.param(index, plan, id=f"{MODELS[index].get('model_type', 'llama')}-{plan.short()}")
        for index, plan in drawn
    ]


@cache
def _reference(model_index: int) -> Run:
    return merge(_train(model_index, Plan.uniform(LAYERS, precision=DOUBLE)))


def _train(model_index: int, plan: Plan) -> list[Run]:
    config = tiny_config(**MODELS[model_index])

    def body() -> Run:
        return train(plan, config, sequences=SEQUENCES, length=LENGTH, eps=1e-2, clip_norm=0.0)

    return run_ranks(plan.world_size, body)


@pytest.mark.parametrize(("model_index", "plan"), _drawn())
def test_a_drawn_plan_equals_one_process(model_index: int, plan: Plan) -> None:
    assert_equal_runs(merge(_train(model_index, plan)), _reference(model_index), 1e-12)
