"""Starts the ranks of a run on this machine, through torch's elastic agent, and explains failures.

The agent starts and watches the ranks. What it cannot see, a rank that ends with exit code 0 in the
middle of the run, a watch of our own sees in the status files.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from triptych.checkpoint.find import newest_complete
from triptych.errors import CheckpointError, InputError, Problem, RunError
from triptych.train.entry import run_rank
from triptych.train.failure import first_cause, last_words, rank_ends
from triptych.train.folder import RunFolder
from triptych.train.job import Job
from triptych.train.result import Summary
from triptych.train.status import Phase, read_status

SHUTDOWN_S = 4  # between asking a rank to end and killing it
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK_S = 0.5
_GRACE_S = 2.0  # a rank that is done needs a moment to leave

Entry = Callable[[str], Summary]


def launch(
    run: RunFolder, ranks: int, checkpoints: Path, *, on_gpu: bool, entry: Entry = run_rank
) -> Summary:
    """Trains the prepared run in a folder on `ranks` local processes; the summary of rank 0.

    Raises RunError with the first cause if a rank fails (InputError if its input was bad), and
    KeyboardInterrupt after Ctrl-C; then no process is left.
    """
    run.clear_last_launch()
    watch = _Watch(run, ranks)
    _quiet_agent()
    try:
        with _same_signals(), watch:
            results = elastic_launch(_config(ranks, on_gpu), entry)(str(run.path))
    except ChildFailedError:
        raise _failure(run, watch, checkpoints) from None
    except SignalException as error:
        if watch.found_dead:
            raise _failure(run, watch, checkpoints) from None
        _restore_screen()
        if error.sigval == signal.SIGINT:
            _say_where(run, checkpoints)
            raise KeyboardInterrupt from None
        raise RunError(f"stopped by {signal.Signals(error.sigval).name}") from None
    summary: Summary = results[0]
    return summary


def require_resumable(job: Job) -> None:
    """Returns if the checkpoints in a job's folder suit it; rank 0 will tell which one it loads.

    Raises CheckpointError if it should resume but no checkpoint is complete, or if it should not
    although there is one.
    """
    folder = Path(job.checkpoint.folder or "")
    found, _ = newest_complete(folder)
    if found is not None and job.checkpoint.resume == "never":
        rule = 'a run with resume = "never" starts in a folder without checkpoints'
        works = '[checkpoint] resume = "auto" to go on from it, or another [run] folder'
        raise CheckpointError(Problem(f"{folder} holds {found.name}", rule, works))


def _config(ranks: int, on_gpu: bool) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn" if on_gpu else "forkserver",  # CUDA forbids forking
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(),
        shutdown_timeout=SHUTDOWN_S,
    )


@contextmanager
def _same_signals() -> Iterator[None]:
    """The agent's signal handlers are gone afterwards."""
    if not _is_main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _quiet_agent() -> None:
    """The agent's own words about a failed rank would bury ours."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def _failure(run: RunFolder, watch: _Watch, checkpoints: Path) -> RunError | InputError:
    """The error to raise for a failed launch; bad input keeps its own words and exit code."""
    _restore_screen()
    ends = rank_ends(run, watch.exit_codes())
    cause = first_cause(ends)
    if cause is not None and cause.error is not None and cause.error.is_input:
        return InputError(Problem(cause.error.text.removeprefix("- ")))
    return RunError(last_words(run, ends, _newest(checkpoints)))


def _say_where(run: RunFolder, checkpoints: Path) -> None:
    """Tells where an interrupted run stood and what it can go on from."""
    status, newest = read_status(run.status(0)), _newest(checkpoints)
    step = status.step if status else 0
    words = f"the same command goes on from {newest}" if newest else "there is no checkpoint yet"
    sys.stderr.write(f"stopped at step {step}; {words}\n")


def _newest(checkpoints: Path) -> Path | None:
    try:
        return newest_complete(checkpoints)[0]
    except InputError:
        return None


def _restore_screen() -> None:
    """A rank that died could not give the cursor back nor end its line."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")
        sys.stderr.flush()


class _Watch:
    """Looks for ranks that are gone without being done, while the agent runs.

    The agent takes exit code 0 for success. On gloo the other ranks then fail by themselves; on
    NCCL they would wait for the time-out, and if all ranks leave so, the agent waits forever.
    """

    def __init__(self, run: RunFolder, ranks: int) -> None:
        self._run = run
        self._ranks = ranks
        self._main = threading.get_ident() if _is_main_thread() else None
        self._processes: dict[int, BaseProcess] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="rank-watch")
        self.found_dead = False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def exit_codes(self) -> list[int | None]:
        """How each rank ended, by its process; None where that was not seen."""
        codes: list[int | None] = []
        for rank in range(self._ranks):
            status = read_status(self._run.status(rank))
            process = self._processes.get(status.pid) if status else None
            codes.append(process.exitcode if process else None)
        return codes

    def _look(self) -> None:
        dead_since_s: float | None = None
        while not self._stop.wait(_LOOK_S):
            self._remember()
            if not self._some_rank_vanished():
                dead_since_s = None
            elif dead_since_s is None:
                dead_since_s = time.monotonic()
            elif time.monotonic() - dead_since_s >= _GRACE_S:
                self._end_launch()
                return

    def _remember(self) -> None:
        """Keeps hold of the ranks' processes until all are known: they tell the exit codes."""
        if len(self._processes) < self._ranks:
            children = multiprocessing.active_children()
            self._processes |= {p.pid: p for p in children if p.pid is not None}

    def _some_rank_vanished(self) -> bool:
        for rank in range(self._ranks):
            status = read_status(self._run.status(rank))
            if status is not None and status.phase is not Phase.DONE and not _is_alive(status.pid):
                return True
        return False

    def _end_launch(self) -> None:
        """Ends the ranks that are left, which the agent notices; if none is left, the agent."""
        self.found_dead = True
        statuses = [read_status(self._run.status(rank)) for rank in range(self._ranks)]
        alive = [status.pid for status in statuses if status and _is_alive(status.pid)]
        for pid in alive:
            os.kill(pid, signal.SIGTERM)
        if not alive and self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
