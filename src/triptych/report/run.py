"""A run folder as a value: what was planned, predicted and measured.

Every file but one of them may be missing, and a damaged file counts as missing: the value says
which and why, and the report shows the rest.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.errors import InputError, Problem
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_from_toml
from triptych.schedule.timeline import Timeline

SCHEMA_VERSION = 1

SEARCH = "search.json"
FILES = (
    "job.toml",
    "plan.toml",
    SEARCH,
    "prediction.json",
    "metrics.jsonl",
    "timeline.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step, as `metrics.jsonl` has it. What a line lacks is None or empty."""

    step: int
    loss: float
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    time_s: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: float | None = None
    mfu: float | None = None
    data_wait_s: float | None = None
    time: float | None = None  # seconds since 1970
    plan: str | None = None  # in one line; a resumed run may have changed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The loss on held-out text after a step."""

    step: int
    loss: float
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a report can show; `absent` maps a file's name to why it is not here.

    `prediction` and `search` are the JSON documents of `triptych predict` and `triptych plan`.
    """

    name: str
    plan: Plan | None = None
    job: Mapping[str, Any] | None = None
    prediction: Mapping[str, Any] | None = None
    search: Mapping[str, Any] | None = None
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    timeline: Timeline | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def predicted_timeline(self) -> Timeline | None:
        """The timeline of the prediction, if it has one."""
        document = (self.prediction or {}).get("timeline")
        return Timeline.from_json(document) if document else None


def read_run(folder: Path) -> Run:
    """The run in a folder. Raises InputError if the folder holds none of a run's files."""
    if not any((folder / name).is_file() for name in FILES):
        raise InputError(_no_run(folder))
    absent: dict[str, str] = {}

    def read(name: str, parse: Callable[[str], Any]) -> Any:
        try:
            return parse((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            absent[name] = "none, the job named its plan" if name == SEARCH else "missing"
        except (OSError, ValueError, InputError) as error:
            absent[name] = f"cannot be read: {str(error).removeprefix('- ')}"
        return None

    steps, evaluations = read("metrics.jsonl", _metrics) or ((), ())
    return Run(
        name=folder.resolve().name,
        plan=read("plan.toml", plan_from_toml),
        job=read("job.toml", tomllib.loads),
        prediction=read("prediction.json", _prediction),
        search=read(SEARCH, _document),
        steps=steps,
        evaluations=evaluations,
        timeline=read("timeline.json", lambda text: Timeline.from_json(json.loads(text))),
        absent=absent,
    )


def _no_run(folder: Path) -> Problem:
    if not folder.is_dir():
        return Problem(f"'{folder}' is not a folder", works="the run folder of `triptych train`")
    runs = [child.parent for child in sorted(folder.glob("*/metrics.jsonl"))]
    works = " or ".join(map(str, runs[:3])) or "the run folder of `triptych train`"
    rule = f"a run folder holds at least one of {', '.join(FILES)}"
    return Problem(f"'{folder}' is not a run folder", rule, works)


def _document(text: str) -> dict[str, Any]:
    """A JSON object of a schema version that we know."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    version = document.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version!r}; this version reads {SCHEMA_VERSION}")
    return document


def _prediction(text: str) -> dict[str, Any]:
    document = _document(text)
    if document.get("timeline"):
        Timeline.from_json(document["timeline"])  # a damaged one makes the file unreadable
    return document


def _metrics(text: str) -> tuple[tuple[Step, ...], tuple[Evaluation, ...]]:
    """Steps and evaluations in order of steps.

    A step that was done again after a restart counts once, as it went the last time.
    """
    steps: dict[int, Step] = {}
    evaluations: dict[int, Evaluation] = {}
    for line in _objects(text.splitlines()):
        number = int(line["step"])
        if "loss" in line:
            known = {name: line[name] for name in Step.__slots__ if line.get(name) is not None}
            steps[number] = Step(**known)
        if "eval_loss" in line:
            evaluations[number] = Evaluation(
                step=number, loss=line["eval_loss"], tokens=line.get("eval_tokens")
            )
    return (
        tuple(steps[number] for number in sorted(steps)),
        tuple(evaluations[number] for number in sorted(evaluations)),
    )


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines' objects with a step; a half-written last line, as a killed run leaves, is not one.

    Raises ValueError for a damaged line elsewhere.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"line {number}: not a JSON object")
        if "step" in value:
            yield value
