"""Metrics beside metrics.jsonl: TensorBoard, traces, samples."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import make_job, metrics, run_job

from triptych.errors import JobError
from triptych.schedule.timeline import COMPUTE_WORK, work_of
from triptych.train import trackers


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that asks for everything."""
    path = make_job(tmp_path_factory.mktemp("tracked"))
    run_job(
        path,
        "parallel.plan=tp=2,pp=2",
        'run.trackers=["tensorboard"]',
        "run.trace_steps=[3, 4]",
        'train.sample_prompts=["alpha", "beta gamma"]',
        "train.sample_tokens=3",
        "run.peak_tflops=1e-6",
    )
    return path


def test_tensorboard_has_what_metrics_jsonl_has(job: Path) -> None:
    events = EventAccumulator(str(job.parent / "run" / "tensorboard"))
    events.Reload()
    lines = [line for line in metrics(job) if "loss" in line]
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "data_wait_s"):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({line["step"]: line[name] for line in lines}, rel=1e-6)
    assert len(events.Scalars("time_s/tensor_comm")) == 4
    assert events.Scalars("memory_terms_bytes/parameters")[0].value > 0


def test_a_trace_has_the_chosen_steps_of_all_ranks_in_one_file(job: Path) -> None:
    document = json.loads((job.parent / "run" / "trace.json").read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {(e["pid"], e["args"]["step"]) for e in spans} == {
        (rank, step) for rank in range(4) for step in (3, 4)
    }
    computed = [e for e in spans if work_of(e["name"]) in COMPUTE_WORK]
    assert len(computed) == 2 * 4 * 2 * 8, "8 forwards and backwards on each rank in each step"
    for rank in range(4):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in computed if e["pid"] == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert "rank 3: tp=1 cp=0 dp=0 pp=1" in names


def test_prompts_are_continued_at_both_ends(job: Path) -> None:
    lines = (job.parent / "run" / "samples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (0, 4) for prompt in ("alpha", "beta gamma")
    ]


def test_memory_is_told_by_term(job: Path) -> None:
    (line,) = [line for line in metrics(job) if "memory_terms_bytes" in line]
    terms = line["memory_terms_bytes"]
    assert terms["parameters"] > 0 and terms["optimizer"] >= 2 * terms["parameters"]
    assert terms["peak"] > sum(terms[name] for name in ("parameters", "gradients", "optimizer"))


def test_a_tracker_that_is_not_installed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="wandb is not installed"):
        run_job(make_job(tmp_path), "parallel.plan=dp=2", 'run.trackers=["wandb"]')
    assert not (tmp_path / "run").exists()
