"""A process that imports torch while the launcher still reads text, and forks the ranks.

Imports take seconds; ranks that are forked from a process that has done them start at once. Free
of torch itself: the launcher calls this before it imports anything slow.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

PRELOAD = (
    "triptych.train.preloading",  # before all others
    "torch",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "triptych.train.worker",
)
LAST = "triptych.train.preloaded"


def start_fork_server(num_ranks: int, model_type: str = "") -> None:
    """A fork server is starting, with the imports that `num_ranks` ranks on this node need.

    Ranks share the cores: each gets its part of them for its arithmetic.
    """
    family = [f"transformers.models.{model_type}.modeling_{model_type}"] if model_type else []
    multiprocessing.set_forkserver_preload([*PRELOAD, *family, LAST])
    resource_tracker.ensure_running()
    with _environment(OMP_NUM_THREADS=str(threads_per_rank(num_ranks))), _no_interrupt():
        forkserver.ensure_running()


def threads_per_rank(num_ranks: int) -> int:
    """Threads of one rank: its share of the cores this process may use, or what the user set."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(asked) if asked.isdecimal() and int(asked) else max(1, (cores or 1) // num_ranks)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """The environment has these values inside; what starts there inherits them."""
    former = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in former.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C is held back inside; a fork server started here ignores it while it imports."""
    blocked: Sequence[signal.Signals] = (signal.SIGINT,)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
