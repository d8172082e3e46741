"""Tiny training runs for tests: made ready, launched, read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from job_samples import write_job

from triptych.train.folder import RunFolder
from triptych.train.job import Job
from triptych.train.job_file import read_job
from triptych.train.launch import launch, require_resumable
from triptych.train.planning import Found
from triptych.train.prepare import Draft, draft, write_run
from triptych.train.result import Summary

WITHOUT_TORCH = """
import sys
from triptych.cli.main import run
code = run(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""
"""Runs a command line that ends before torch is imported: in a second, not in ten."""


class NoSearch:
    """The planner of jobs that name their plan."""

    def search(self, *_: object) -> Found:
        raise AssertionError("the job names its plan")

    def price(self, *_: object) -> Mapping[str, Any]:
        return {}


def make_job(folder: Path) -> Path:
    """A job for a 4-layer Llama in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_job(folder)


def make_ready(job_path: Path, *overrides: str) -> tuple[Draft, RunFolder, Job]:
    """A run that is ready to launch."""
    job = read_job(job_path, overrides)
    made = draft(job, None, NoSearch(), lambda _: None)
    require_resumable(job)
    return made, write_run(made), job


def run_job(
    job_path: Path, *overrides: str, entry: Callable[[str], Summary] | None = None
) -> Summary:
    """Trains; `entry` stands for the entry of each rank."""
    made, run, job = make_ready(job_path, *overrides)
    options: dict[str, Any] = {} if entry is None else {"entry": entry}
    return launch(run, made.choice.plan.world_size, job, on_gpu=False, **options)


def stop_fork_server() -> None:
    """The next run starts a new one, with the file descriptors of then."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def metrics(job_path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = (job_path.parent / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(job_path: Path) -> dict[int, float]:
    """The training loss by step."""
    return {line["step"]: line["loss"] for line in metrics(job_path) if "loss" in line}


def eval_losses(job_path: Path) -> dict[int, float]:
    """The evaluation loss by step."""
    return {line["step"]: line["eval_loss"] for line in metrics(job_path) if "eval_loss" in line}
