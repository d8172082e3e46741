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

LAYERS = 8
CONFIG = tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=True)
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


@cache
def _reference() -> Run:
    def body() -> Run:
        return train(Plan.uniform(LAYERS, precision=DOUBLE), CONFIG, sequences=8, eps=1e-2)

    return merge(run_ranks(1, body))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_schedule_equals_one_process(case: str, pp: int) -> None:
    settings = CASES[case]
    if pp * settings.get("chunks", 1) > LAYERS:
        pp = 2
    plan = Plan.uniform(LAYERS, pp=pp, precision=DOUBLE, **settings)

    def body() -> Run:
        return train(plan, CONFIG, sequences=8, eps=1e-2)

    assert_equal_runs(merge(run_ranks(plan.world_size, body)), _reference(), 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_what_runs_is_the_program(case: str) -> None:
    plan = Plan.uniform(LAYERS, pp=2, **{**CASES[case], "tp": 1, "dp": 1, "zero": 0})
    plan = plan.with_(sequence_parallel=False)

    def body() -> list[str]:
        engine = make_engine(plan, CONFIG)
        ids = torch.zeros(1, 16, dtype=torch.long)
        engine.step([MicroBatch(ids, ids)] * 6, 1e-3)
        return [mark.label for mark in engine._recorder.marks() if mark.label[0].isdigit()]

    program = build_program(plan.schedule, plan.pp, 6, plan.chunks)
    for rank, executed in enumerate(run_ranks(2, body)):
        assert executed == [str(action) for action in program.actions[rank]]
