"""Every schedule runs as written: same numbers as one process, in the order of the program."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from layouts import DOUBLE, Run, assert_equal_runs, make_engine, merge, tiny_config, train
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import MicroBatch
from triptych.schedule.generate import build_program

MOST_LAYERS = 8


def _config(layers: int) -> dict[str, Any]:
    return tiny_config(num_hidden_layers=layers, tie_word_embeddings=True)


CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "interleaved x4": {"schedule": "interleaved", "chunks": 4},
    "breadth-first": {"schedule": "breadth-first", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "zb-v": {"schedule": "zb-v", "chunks": 2},
    "dualpipe-v": {"schedule": "dualpipe-v", "chunks": 2},
    "zb-auto": {"schedule": "zb-auto"},
    "zb-h1 TP2+SP": {"schedule": "zb-h1", "tp": 2, "sequence_parallel": True},
    "zb-v DP2 ZeRO-1": {"schedule": "zb-v", "chunks": 2, "dp": 2, "zero": 1},
    "interleaved recompute": {"schedule": "interleaved", "chunks": 2, "recompute": "full"},
    "zb-h1 recompute": {"schedule": "zb-h1", "recompute": "full"},
}


def _plan(case: str, pp: int, **changes: Any) -> Plan:
    """A plan of a case; four layers where there are no more stages."""
    settings = {**CASES[case], **changes}
    stages = pp * settings.get("chunks", 1)
    return Plan.uniform(4 if stages <= 4 else MOST_LAYERS, pp=pp, precision=DOUBLE, **settings)


def _train(plan: Plan) -> Run:
    return train(plan, _config(plan.num_layers), sequences=8, eps=1e-2)


@cache
def _reference(layers: int) -> Run:
    return merge(run_ranks(1, _train, Plan.uniform(layers, precision=DOUBLE)))


@pytest.mark.parametrize(
    ("case", "pp"),
    [
        (case, pp)
        for case, settings in CASES.items()
        for pp in (2, 4)
        if pp * settings.get("chunks", 1) <= MOST_LAYERS
    ],
)
def test_a_schedule_equals_one_process(case: str, pp: int) -> None:
    plan = _plan(case, pp)
    found = merge(run_ranks(plan.world_size, _train, plan))
    assert_equal_runs(found, _reference(plan.num_layers), 1e-12)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_what_runs_is_the_program(case: str) -> None:
    plan = _plan(case, 2, tp=1, dp=1, zero=0, sequence_parallel=False)

    def body() -> list[str]:
        engine = make_engine(plan, _config(plan.num_layers))
        ids = torch.zeros(1, 16, dtype=torch.long)
        engine.step([MicroBatch(ids, ids)] * 6, 1e-3)
        return [mark.label for mark in engine._recorder.marks() if mark.label[0].isdigit()]

    program = build_program(plan.schedule, plan.pp, 6, plan.chunks)
    for rank, executed in enumerate(run_ranks(2, body)):
        assert executed == [str(action) for action in program.actions[rank]]
