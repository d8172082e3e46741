"""metrics.jsonl: one line a step, whole lines only, nothing twice after a restart."""

from __future__ import annotations

import json
from pathlib import Path

from triptych.train.metrics import EvaluationRecord, Metrics, StepRecord


def record(step: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=128,
        step_time_s=0.5,
        time_s={"compute": 0.4},
        bytes_sent={"tensor": 10},
        memory_bytes=1000,
    )


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_has_all_quantities(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path, "tp=2").step(record(1))
    (line,) = lines(path)
    assert (line["tokens_per_s"], line["plan"]) == (256.0, "tp=2")
    assert line.keys() >= {
        *("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "step_time_s"),
        *("time_s", "bytes_sent", "memory_bytes", "time", "schema_version"),
    }


def test_an_evaluation_has_loss_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path).evaluation(EvaluationRecord(4, 3.5, 99))
    (line,) = lines(path)
    assert (line["step"], line["eval_loss"], line["eval_tokens"]) == (4, 3.5, 99)
    assert "loss" not in line


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.evaluation(EvaluationRecord(0, 9.0, 1))
    for step in range(1, 8):
        metrics.step(record(step))
        if step % 2 == 0:
            metrics.evaluation(EvaluationRecord(step, 5.0, 1))
    with path.open("a") as stream:
        stream.write('{"step": 8, "lo')
    metrics.start_after(4)
    kept = [(line["step"], "eval_loss" in line) for line in lines(path)]
    assert kept == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False)]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path).start_after(0)
    assert not path.exists()
    Metrics(path).step(record(1))
    Metrics(path).start_after(0)
    assert path.read_text() == ""
