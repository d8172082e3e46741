"""Checkpoints of a run: what is saved beside the tensors, and where a new launch goes on."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from triptych.checkpoint import find, read, write
from triptych.checkpoint import folder as names
from triptych.checkpoint.background import Background
from triptych.checkpoint.index import Id
from triptych.checkpoint.snapshot import Snapshot, Snapshots
from triptych.checkpoint.together import Ranks
from triptych.checkpoint.weights import KINDS
from triptych.errors import CheckpointError, Problem, StorageError
from triptych.plan.freeze import known_names
from triptych.runtime.engine import Engine
from triptych.train.job import Job
from triptych.train.preflight import disk_lines
from triptych.train.result import Position

_LISTED = 3  # parameters in a message
_PATIENCE_S = 1800.0
_LAST_SAVE_S = 15.0
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
    """Saves and resumes one engine. All calls are collective over the ranks.

    A save in the middle of a run is written beside the training (`[checkpoint] asynchronous`): the
    training thread only copies what is saved. Its outcome is asked for at the next save or at the
    end, so that all ranks learn it at the same point of the run.
    """

    def __init__(
        self,
        engine: Engine,
        job: Job,
        stream: Stream,
        files: Mapping[str, bytes],
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._settings = engine, job.checkpoint
        self._stream, self._files = stream, files
        self._folder = Path(job.checkpoint.folder or "")
        self._say = say
        self._group = _side_group(job.parallel.timeout_s)
        self._snapshots = Snapshots()
        self._background: Background[Path] = Background("checkpoint")
        self._failed = 0
        self._best: tuple[float, int] | None = None  # evaluation loss and step
        self._under_way = 0  # the step that is being saved
        self._eval_loss: float | None = None  # there
        self._newest: tuple[int, Path] | None = None
        self.blocked_s = 0.0
        """Seconds for which saves kept this thread from training."""

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that is known to be complete: saved or resumed from."""
        return self._newest[1] if self._newest else None

    def room(self) -> list[str]:
        """What checkpoints will need and what there is, in words; collective.

        Raises CheckpointError on all ranks if not even one can be written.
        """
        saved = [shard for shard in self._engine.shards() if shard.saved]
        ranks, settings = Ranks(self._group), self._settings
        needed_bytes = write.total_bytes(saved, ranks)
        copies = settings.keep_last + settings.keep_best + 1
        copy_bytes = sum(shard.tensor.nbytes for shard in saved) if settings.every else 0
        copy_bytes *= settings.asynchronous
        return ranks.on_first(lambda: disk_lines(self._folder, needed_bytes, copies, copy_bytes))

    def save(
        self, position: Position, eval_loss: float | None = None, *, waits: bool = False
    ) -> None:
        """Saves beside the training, or, if it `waits` or the job says so, before it returns.

        `eval_loss`, if known, is that of these weights: the step with the lowest is kept.

        A disk that failed is told, and training goes on, up to `[checkpoint] failures` times in a
        row. Raises StorageError if it failed once more, or if the save waits.
        """
        begun_s = time.perf_counter()
        self.settle()
        if self._newest is None or self._newest[0] != position.step:
            beside = self._settings.asynchronous and not waits
            self._begin(position, eval_loss, beside)
            if not beside:
                self.settle(is_last=waits)
        self.blocked_s += time.perf_counter() - begun_s

    def _begin(self, position: Position, eval_loss: float | None, beside: bool) -> None:
        shards = self._engine.shards()
        snapshot = self._snapshots.take(shards) if beside else Snapshot(shards, lambda: None)
        state = position._asdict() | {"stream": asdict(self._stream), "eval_loss": eval_loss}
        state |= self._engine.training_state()
        self._under_way, self._eval_loss = position.step, eval_loss
        protect = [self._best[1]] if self._best else []

        def write_all() -> Path:
            snapshot.wait()
            return write.save(
                self._folder,
                position.step,
                snapshot.shards,
                state,
                self._group,
                files=self._files,
                keep_last=self._settings.keep_last,
                protect=protect,
                retries=self._settings.retries,
            )

        self._background.start(write_all)

    def settle(self, *, is_last: bool = False) -> None:
        """Waits for the save that is under way, if any, and takes its outcome as `save` says."""
        if not self._background.has_outcome:
            return
        try:
            path = self._background.outcome()
        except StorageError as error:
            self._failed += 1
            if is_last or self._failed > self._settings.failures:
                raise
            self._say(f"warning: {error}\n    training goes on; newest is {self.newest or 'none'}")
        except Exception as error:
            error.add_note(f"while the checkpoint of step {self._under_way} was written")
            raise
        else:
            self._failed = 0
            self._newest = (names.step_of(path), path)
            if self._settings.keep_best and self._eval_loss is not None:
                found = (self._eval_loss, self._newest[0])
                self._best = min(self._best or found, found)

    def let_finish(self) -> None:
        """After a failure: lets a save that is under way end, if all ranks can still write."""
        self._background.join(_LAST_SAVE_S)

    def resume(self) -> Position | None:
        """Loads the newest intact checkpoint, or its weights; None if the run has none.

        Skipped ones are told. Raises CheckpointError if there are checkpoints but none is intact,
        or if the run's text, sequence length, seed or frozen parameters changed.
        """
        kinds = KINDS if self._settings.resume == "weights" else None
        path, warnings = find.newest_intact(self._folder, kinds=kinds)
        for warning in warnings:
            self._say(f"warning: {warning}")
        if path is None:
            return None
        state = read.state(path)
        require_same_stream(path, state.get("stream", {}), self._stream)
        position = Position.of(state)
        if kinds:
            position = self._load_weights(path, position)
        else:
            self._load_all(path, state)
        self._newest = (position.step, path)
        self._best = _best(self._folder, position.step) if self._settings.keep_best else None
        self._say(f"resumed from {path} after step {position.step}")
        return position

    def _load_all(self, path: Path, state: Mapping[str, Any]) -> None:
        known = set(known_names(self._engine.model))  # of others the loading speaks
        stored = [i for i in read.complete_index(path).tensors if i[1] in known]
        require_same_frozen(path, stored, self._engine.frozen)
        read.load(path, self._engine.shards(), verify=False)  # its checksums were just compared
        self._engine.after_load(int(state["step"]), state)

    def _load_weights(self, path: Path, position: Position) -> Position:
        """Loads weights alone: of the steps so far the moments have seen none."""
        wanted = [s for s in self._engine.shards() if s.kind in ("weight", "master")]
        read.load(path, wanted, verify=False, kinds=KINDS)
        position = position._replace(unseen=position.step)
        self._engine.after_load(position.step, position._asdict())
        self._say("the optimizer starts anew: weights alone are read")
        return position


def _side_group(timeout_s: float) -> dist.ProcessGroup | None:
    """The ranks once more, for saves beside the training; a slow disk is no hang."""
    if not dist.is_initialized():
        return None
    timeout = datetime.timedelta(seconds=max(timeout_s, _PATIENCE_S))
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _best(folder: Path, last: int) -> tuple[float, int] | None:
    """The lowest evaluation loss of the checkpoints up to a step, and its step."""
    found = []
    for step, path in names.checkpoints(folder):
        if step <= last and names.fault(path) is None:
            loss = read.state(path).get("eval_loss")
            found += [] if loss is None else [(float(loss), step)]
    return min(found, default=None)


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
