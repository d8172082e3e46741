"""Forty plans drawn from the legal ones, up to 8 ranks, each equal to one process."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from layouts import DOUBLE, Run, assert_equal_runs, merge, tiny_config, train
from ranks import run_ranks

from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS

LENGTH, COUNT = 32, 40
MOST_LAYERS, MOST_SEQUENCES = 8, 8
MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True, "vocab_size": 503},
    {"model_type": "qwen3", "head_dim": 16},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {
        **{"model_type": "mixtral", "intermediate_size": 48},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
)


def _draw(generator: random.Random) -> tuple[int, Plan]:
    """A model and a legal plan of 2 to 8 ranks that runs."""
    workload = Workload(sequence_length=LENGTH, global_batch=MOST_SEQUENCES)
    while True:
        schedule = generator.choice(list(TRAITS))
        model_index = generator.randrange(len(MODELS))
        settings: dict[str, Any] = {
            "tp": generator.choice((1, 2, 4)),
            "pp": generator.choice((1, 2, 3, 4)),
            "dp": generator.choice((1, 2, 4)),
            "cp": generator.choice((1, 1, 2)),
            "ep": generator.choice((1, 2, 4)) if model_index == len(MODELS) - 1 else 1,
            "zero": generator.choice((0, 1, 2, 3)),
            "schedule": schedule,
            "chunks": max(TRAITS[schedule].least_chunks, 1),
            "microbatch": generator.choice((1, 2)),
            "recompute": generator.choice(("none", "full")),
            "bucket_bytes": generator.choice((20_000, 1 << 25)),
            "context_method": generator.choice(("ring", "ulysses")),
        }
        settings["sequence_parallel"] = settings["tp"] > 1 and generator.random() < 0.7
        stages = settings["pp"] * settings["chunks"]
        if stages > MOST_LAYERS:
            continue
        plan = Plan.uniform(4 if stages <= 4 else MOST_LAYERS, precision=DOUBLE, **settings)
        if not 2 <= plan.world_size <= 8 or MOST_SEQUENCES % (plan.dp * plan.microbatch):
            continue
        model = _model(model_index, plan)
        if not verify(plan, model, None, workload) and not unrunnable(plan, model):
            return model_index, plan


def _drawn() -> list[Any]:
    generator = random.Random(20)
    drawn = [_draw(generator) for _ in range(COUNT)]
    return [
        pytest.param(index, plan, id=f"{MODELS[index].get('model_type', 'llama')}-{plan.short()}")
        for index, plan in drawn
    ]


def _config(model_index: int, layers: int) -> dict[str, Any]:
    return tiny_config(**MODELS[model_index], num_hidden_layers=layers)


def _model(model_index: int, plan: Plan) -> Model:
    return from_config(_config(model_index, plan.num_layers), name="tiny")


def _sequences(model_index: int, plan: Plan) -> int:
    """Few, but two micro-batches a replica and as many as there are stages, if that is legal."""
    few = MOST_SEQUENCES // 2
    workload = Workload(sequence_length=LENGTH, global_batch=few)
    if few < plan.dp * plan.microbatch * max(2, plan.pp):
        return MOST_SEQUENCES
    is_legal = not verify(plan, _model(model_index, plan), None, workload)
    return few if is_legal else MOST_SEQUENCES


@cache
def _reference(model_index: int, layers: int, sequences: int) -> Run:
    return merge(_train(model_index, Plan.uniform(layers, precision=DOUBLE), sequences))


def _train(model_index: int, plan: Plan, sequences: int) -> list[Run]:
    config = _config(model_index, plan.num_layers)

    def body() -> Run:
        return train(plan, config, sequences=sequences, length=LENGTH, eps=1e-2, clip_norm=0.0)

    return run_ranks(plan.world_size, body)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("model_index", "plan"), _drawn())
def test_a_drawn_plan_equals_one_process(model_index: int, plan: Plan) -> None:
    sequences = _sequences(model_index, plan)
    expected = _reference(model_index, plan.num_layers, sequences)
    assert_equal_runs(merge(_train(model_index, plan, sequences)), expected, 1e-12)
