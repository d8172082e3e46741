"""Runs in which one rank is killed at a random moment, and which start their ranks again."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoints import Tensors, whole_tensors
from tiny_runs import make_job, make_ready

from triptych.checkpoint.folder import unfinished
from triptych.train.folder import RunFolder
from triptych.train.launch import launch
from triptych.train.status import Phase, Status, read_status

SETTINGS = (
    *("checkpoint.every=1", "parallel.restarts=2", "checkpoint.grace_s=5"),
    *("model.config.num_hidden_layers=2", "model.config.hidden_size=32"),
    "model.config.intermediate_size=48",
)
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a rank was doing when it was killed."""

    rank: int
    step: int
    phase: Phase
    is_saving: bool  # a checkpoint was being written


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """How a run with a kill ended."""

    kill: Kill | None  # None: the run was over before
    is_equal: bool  # every bit of the last checkpoint is that of the unbroken run
    restarts: int
    wall_s: float


class Cycles:
    """The same run again and again: first unbroken, then with a kill each."""

    def __init__(self, folder: Path, plan: str, steps: int = 6) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        overrides = (f"parallel.plan={plan}", f"train.steps={steps}", *SETTINGS)
        cache = f'data.cache="{folder}/tokens"'
        made, self._run, self._job = make_ready(make_job(folder), *overrides, cache)
        self._ranks = made.choice.plan.world_size
        watcher = _Stopwatch(self._run, self._ranks)
        with watcher:
            self._launch()
        self.trains_s = watcher.trains_s
        self._last = self._run.path / "checkpoints" / f"step-{steps:08d}"
        self._expected: Tensors = whole_tensors(self._last)

    def _launch(self) -> None:
        shutil.rmtree(self._run.path / "checkpoints", ignore_errors=True)
        self._run.metrics.unlink(missing_ok=True)
        launch(self._run, self._ranks, self._job, on_gpu=False)

    def cycle(self, chance: random.Random) -> Cycle:
        """One run with a kill."""
        begun_s = time.monotonic()
        killer = _Killer(
            self._run,
            self._ranks,
            rank=chance.randrange(self._ranks),
            after_s=chance.uniform(0.0, self.trains_s),
        )
        with killer:
            self._launch()
        found = whole_tensors(self._last)
        attempts = self._run.path / "attempts"
        return Cycle(
            kill=killer.kill,
            is_equal=found.keys() == self._expected.keys()
            and all(found[key].equal(self._expected[key]) for key in found),
            restarts=len(list(attempts.iterdir())) if attempts.is_dir() else 0,
            wall_s=time.monotonic() - begun_s,
        )


class _Beside:
    """A thread beside a launch that waits until all of its ranks train."""

    def __init__(self, run: RunFolder, ranks: int) -> None:
        self._run, self._ranks = run, ranks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Beside:
        for rank in range(self._ranks):
            self._run.status(rank).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            statuses = [read_status(self._run.status(rank)) for rank in range(self._ranks)]
            ready = [s for s in statuses if s is not None and s.step > 0]
            if len(ready) == self._ranks:
                self.on_training(ready)
                return

    def on_training(self, statuses: list[Status]) -> None:
        raise NotImplementedError


class _Stopwatch(_Beside):
    """How long the ranks trained."""

    trains_s = 0.0

    def on_training(self, statuses: list[Status]) -> None:
        begun_s = time.monotonic()
        while not self._over.wait(_LOOK_S):
            status = read_status(self._run.status(0))
            if status is not None and status.phase is Phase.DONE:
                break
        self.trains_s = time.monotonic() - begun_s


class _Killer(_Beside):
    """Kills one rank some time after all train."""

    def __init__(self, run: RunFolder, ranks: int, *, rank: int, after_s: float) -> None:
        super().__init__(run, ranks)
        self._rank, self._after_s = rank, after_s
        self.kill: Kill | None = None

    def on_training(self, statuses: list[Status]) -> None:
        if self._over.wait(self._after_s):
            return
        now = read_status(self._run.status(self._rank))
        if now is None or now.phase is Phase.DONE or now.pid != statuses[self._rank].pid:
            return
        checkpoints = self._run.path / "checkpoints"
        saving = checkpoints.is_dir() and bool(unfinished(checkpoints))
        with contextlib.suppress(ProcessLookupError):
            os.kill(now.pid, signal.SIGKILL)
            self.kill = Kill(rank=self._rank, step=now.step, phase=now.phase, is_saving=saving)
