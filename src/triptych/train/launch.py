"""Starts the ranks of a run on this machine, through torch's elastic agent, and explains failures.

The agent starts and watches the ranks; what it cannot see, `watch.py` does.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from triptych.checkpoint.find import newest_complete
from triptych.checkpoint.weights import KINDS
from triptych.errors import CheckpointError, InputError, Problem, RunError
from triptych.train.entry import run_rank
from triptych.train.failure import first_cause, last_words, rank_ends
from triptych.train.folder import RunFolder
from triptych.train.job import Job
from triptych.train.result import Summary
from triptych.train.status import read_status
from triptych.train.stop import ASKING
from triptych.train.watch import Watch

SHUTDOWN_S = 4  # between asking a rank to end and killing it
_FOR_AGENT = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

Entry = Callable[[str], Summary]


def launch(
    run: RunFolder, ranks: int, job: Job, *, on_gpu: bool, entry: Entry = run_rank
) -> Summary:
    """Trains the prepared run in a folder on `ranks` local processes; the summary of rank 0.

    Ranks that failed are started again as often as the job says. SIGTERM and SIGUSR1 let them save
    and end. Raises RunError with the first cause if a rank fails (InputError if its input was bad),
    and KeyboardInterrupt after Ctrl-C; then no process is left.
    """
    run.clear_last_launch()
    checkpoints = Path(job.checkpoint.folder or "")
    watch = Watch(run, ranks, hang_s=2 * job.parallel.timeout_s, grace_s=job.checkpoint.grace_s)
    _quiet_agent()
    try:
        with _signals_to(watch), watch:
            config = _config(ranks, on_gpu, job.parallel.restarts)
            results = elastic_launch(config, entry)(str(run.path))
    except ChildFailedError:
        raise _failure(run, watch, checkpoints) from None
    except SignalException as error:
        if watch.ended_agent:
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
    found, _ = newest_complete(folder, KINDS if job.checkpoint.resume == "weights" else None)
    if found is not None and job.checkpoint.resume == "never":
        rule = 'a run with resume = "never" starts in a folder without checkpoints'
        works = '[checkpoint] resume = "auto" to go on from it, or another [run] folder'
        raise CheckpointError(Problem(f"{folder} holds {found.name}", rule, works))


def _config(ranks: int, on_gpu: bool, restarts: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="spawn" if on_gpu else "forkserver",  # CUDA forbids forking
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(),
        shutdown_timeout=SHUTDOWN_S,
        signals_to_handle=",".join(number.name for number in _FOR_AGENT),
    )


@contextmanager
def _signals_to(watch: Watch) -> Iterator[None]:
    """Signals that ask to end go to the watch; the agent's handlers are gone afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (*_FOR_AGENT, *ASKING)}
    for number in ASKING:
        signal.signal(number, lambda number, _: watch.ask(number))
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _quiet_agent() -> None:
    """The agent's own words about a failed rank would bury ours."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _failure(run: RunFolder, watch: Watch, checkpoints: Path) -> RunError | InputError:
    """The error to raise for a failed launch; bad input keeps its own words and exit code."""
    _restore_screen()
    ends = rank_ends(run, watch.exit_codes(), watch.ended())
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
