"""metrics.jsonl: a line for every step and every evaluation, under the names of predictions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.train.folder import write_text
from triptych.train.trackers import Tracker, flat

SCHEMA_VERSION = 1


class StepRecord(NamedTuple):
    """What one optimizer step did."""

    step: int  # from 1
    loss: float  # mean over the trained tokens of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # trained, over all ranks
    step_time_s: float  # from the end of the step before to the end of this one
    time_s: Mapping[str, float]  # of rank 0, by term of the prediction
    bytes_sent: Mapping[str, int]  # by rank 0, by mesh axis
    memory_bytes: int  # peak of the largest rank, as far as known
    data_wait_s: float = 0.0  # of rank 0: making the batch
    mfu: float | None = None  # model FLOPs utilisation; None if the peak is unknown
    loss_scale: float | None = None  # None: the precision needs none
    skipped_steps: int = 0  # so far in the run, because gradients overflowed
    is_skipped: bool = False  # this one
    router: Mapping[str, float] | None = None  # of a model with experts: losses, dropped tokens

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, over all ranks."""
        return self.tokens / self.step_time_s if self.step_time_s > 0 else 0.0

    @property
    def pipeline_wait(self) -> float | None:
        """Share of the step that rank 0 waits for other stages: bubble and messages."""
        step_s, wait_s = self.time_s.get("step"), self.time_s.get("pipeline_comm")
        return wait_s / step_s if step_s and wait_s is not None else None


class EvaluationRecord(NamedTuple):
    """The loss on evaluation text."""

    step: int
    loss: float  # mean over all tokens
    tokens: int


class Metrics:
    """Appends lines, each written at once so that a reader or a crash sees whole lines."""

    def __init__(self, path: Path, plan: str = "", trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._trackers = trackers
        self._plan = plan  # of this launch: steps before a resume may have had another

    def start_after(self, step: int) -> None:
        """Later lines of an earlier launch are dropped: that part of the run is done again."""
        if not self._path.is_file():
            return
        lines = self._path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step and not _is_redone(line, step)]
        if kept != lines:
            write_text(self._path, "".join(kept))

    def step(self, record: StepRecord) -> None:
        """Appends a step."""
        values = record._asdict()
        values.update(values.pop("router") or {})
        values["tokens_per_s"] = record.tokens_per_s
        values["pipeline_wait"] = record.pipeline_wait
        values["plan"] = self._plan
        self._append(values)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Appends an evaluation."""
        self._append({"step": record.step, "eval_loss": record.loss, "eval_tokens": record.tokens})

    def memory(self, step: int, terms: Mapping[str, int]) -> None:
        """Appends what rank 0 holds, by term, and its peak."""
        self._append({"step": step, "memory_terms_bytes": dict(terms)})

    def close(self) -> None:
        """Ends the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def _append(self, values: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(int(values["step"]), flat(values))
        values["time"] = time.time()
        values["schema_version"] = SCHEMA_VERSION
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; a line that a crash cut short counts as later than all."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _is_redone(line: str, step: int) -> bool:
    """True for the evaluation at the step itself, which a resumed run does again."""
    return _step_of(line) == step and '"eval_loss"' in line
