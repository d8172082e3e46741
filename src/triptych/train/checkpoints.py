"""Checkpoints of a run: what is saved beside the tensors, and where a new launch goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triptych.checkpoint import find, read, write
from triptych.checkpoint.index import Id
from triptych.errors import CheckpointError, Problem
from triptych.plan.freeze import known_names
from triptych.runtime.engine import Engine
from triptych.train.job import Job
from triptych.train.progress import Reporter
from triptych.train.result import Position

_LISTED = 3  # parameters in a message
_ANOTHER_RUN = (
    "another [run] folder, which starts from these weights with `triptych export` and "
    'init = "weights"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What decides which sample stands at which position: it must not change within a run."""

    text: str  # digest of text and tokenizer
    sequence_length: int
    seed: int


class Checkpoints:
    """Saves and resumes one engine. All calls are collective over the ranks."""

    def __init__(
        self, engine: Engine, job: Job, stream: Stream, files: Mapping[str, bytes]
    ) -> None:
        self._engine = engine
        self._folder = Path(job.checkpoint.folder or "")
        self._keep_last = job.checkpoint.keep_last
        self._stream = stream
        self._files = files

    def save(self, step: int, samples: int) -> Path:
        """A complete checkpoint is in the folder; older ones beyond `keep_last` are gone."""
        return write.save(
            self._folder,
            step,
            self._engine.shards(),
            {"samples": samples, "stream": asdict(self._stream)} | self._engine.training_state(),
            files=self._files,
            keep_last=self._keep_last,
        )

    def resume(self, reporter: Reporter) -> Position | None:
        """Loads the newest intact checkpoint; None if the run has none.

        Skipped ones are told. Raises CheckpointError if there are checkpoints but none is intact,
        or if the run's text, sequence length, seed or frozen parameters changed.
        """
        path, warnings = find.newest_intact(self._folder)
        for warning in warnings:
            reporter.say(f"warning: {warning}")
        if path is None:
            return None
        state = read.state(path)
        require_same_stream(path, state.get("stream", {}), self._stream)
        known = set(known_names(self._engine.model))  # of others the loading speaks
        stored = [i for i in read.complete_index(path).tensors if i[1] in known]
        require_same_frozen(path, stored, self._engine.frozen)
        read.load(path, self._engine.shards(), verify=False)  # its checksums were just compared
        position = Position(int(state["step"]), int(state["samples"]))
        self._engine.after_load(position.step, state)
        reporter.say(f"resumed from {path} after step {position.step}")
        return position


def require_same_stream(path: Path, saved: Mapping[str, Any], now: Stream) -> None:
    """Returns if the position of a checkpoint means the same samples. Raises CheckpointError."""
    changed = [
        f"{name}: {saved.get(name)!r} then, {value!r} now"
        for name, value in asdict(now).items()
        if saved.get(name) != value
    ]
    if changed:
        rule = "a run goes on with the text, tokenizer, sequence length and seed it began with"
        works = _ANOTHER_RUN
        raise CheckpointError(
            Problem(f"{path} is of other data: {'; '.join(changed)}", rule, works)
        )


def require_same_frozen(path: Path, stored: Collection[Id], frozen: Collection[str]) -> None:
    """Returns if what trains now has moments, and nothing else. Raises CheckpointError."""
    names = {kind: {name for k, name in stored if k == kind} for kind in ("weight", "exp_avg")}
    were_frozen = names["weight"] - names["exp_avg"]
    then = [f"{name} was frozen then" for name in sorted(were_frozen - set(frozen))]
    now = [f"{name} is frozen now" for name in sorted(set(frozen) - were_frozen)]
    if changed := then + now:
        more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
        rule = "a run goes on with the parameters frozen that it began with: others have no moments"
        works = "the same [train] freeze, or " + _ANOTHER_RUN
        what = f"{path}: {', '.join(changed[:_LISTED])}{more}"
        raise CheckpointError(Problem(what, rule, works))
