"""A small run folder, written as the launcher and the trainer write theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml
from triptych.schedule.generate import build_program
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Span, Timeline

PLAN = Plan.uniform(5, pp=2, tp=2, dp=1, zero=1)
PREDICTED = simulate(build_program("1f1b", 2, 3), lambda action: 0.01)
RECORDED = Timeline(
    (
        *simulate(build_program("1f1b", 2, 3), lambda action: 0.02).spans,
        Span(0, "optimizer", 0.17, 0.18),
    ),
    2,
)


def prediction(short: str = "tp=2,pp=2,dp=1,precision=fp32", **changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "step_time_s": 0.1,
        "tokens_per_s_per_gpu": 1000.0,
        "model_tflops_per_gpu": 0.05,
        "mfu": 0.4,
        "hfu": 0.5,
        "peak_memory_gib": 0.5,
        "memory_gib": {"weights": 0.2, "gradients": 0.1, "optimizer": 0.2},
        "time_s": {"compute": 0.06, "tensor_comm": 0.01, "data_comm": 0.0, "bubble": 0.03},
        "bubble_fraction": 0.25,
        "bytes_sent_per_rank": {"tensor": 2048.0},
        "fits": True,
        "plan": {"short": short},
        **changes,
    }


SEARCH: dict[str, Any] = {
    "schema_version": 1,
    "search_time_s": 0.25,
    "candidates": 45,
    "legal": 42,
    "simulated": 2,
    "rejected": {"heads do not divide": 3, "memory": 7},
    "bounds": {"memory: state": 7, "time: work": 33},
    "binding": ["bubble: 25% of the step waits"],
    "front": [
        {"plan": "tp=2,pp=2,dp=1", "step_time_s": 0.1, "peak_memory_gib": 0.5},
        {"plan": "tp=4,pp=1,dp=1", "step_time_s": 0.11, "peak_memory_gib": 0.4},
    ],
    "sensitivity": [
        {
            "change": "network x0.5",
            "plan": "tp=4,pp=1,dp=1",
            "step_time_s": 0.12,
            "speed": 0.83,
            "kept_step_time_s": 0.15,
            "is_same": False,
        }
    ],
    "plans": [
        prediction(reason="fastest: <TP> stays in the node"),
        prediction("tp=1,pp=4,dp=1,precision=fp32", step_time_s=0.2, reason="2 times slower"),
    ],
}


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 8.0 - step / 10,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 400,
        "tokens_per_s": 2000.0,
        "step_time_s": 0.2,
        "time_s": {"compute": 0.12, "tensor_comm": 0.02, "bubble": 0.06},
        "bytes_sent": {"tensor": 2048},
        "memory_bytes": 2**29 + step,
        "time": 1.7e9 + step,
        **changes,
    }


def write_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "plan.toml").write_text(plan_toml(PLAN))
    (folder / "job.toml").write_text("[train]\nsteps = 20\n")
    (folder / "prediction.json").write_text(json.dumps(prediction(timeline=PREDICTED.to_json())))
    (folder / "search.json").write_text(json.dumps(SEARCH))
    (folder / "timeline.json").write_text(json.dumps(RECORDED.to_json()))
    lines = [step_line(step) for step in range(1, 21)]
    lines += [{"step": 20, "eval_loss": 6.5, "eval_tokens": 1000}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first-run")


@pytest.fixture
def make_step() -> Callable[..., dict[str, Any]]:
    return step_line


@pytest.fixture
def make_prediction() -> Callable[..., dict[str, Any]]:
    return prediction


@pytest.fixture
def search_document() -> dict[str, Any]:
    return SEARCH
