"""Short work on several ranks of this machine: this process is rank 0, the others its children.

For commands that end by themselves in seconds or minutes. Training has a launcher that watches its
ranks (`train/launch.py`).
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from triptych.errors import PlanError, Problem, RunError, TriptychError

_TIMEOUT = datetime.timedelta(seconds=120)
_GOODBYE_S = 10.0
_PRELOAD = ("torch.distributed", "triptych.runtime.engine")


@contextmanager
def local_ranks(
    world: int, work: Callable[[], object], *, is_fresh: bool = False
) -> Iterator[None]:
    """Inside, this process is rank 0 of `world`; the others do `work` and end with it.

    A process that `is_fresh` has computed nothing with torch yet. Then it has no threads that a
    fork would lose, and the others are forked from it and import nothing again.

    On CUDA each rank takes a device of its own. Raises PlanError if there are too few, RunError if
    a rank dies; none is left then.
    """
    _require_devices(world)
    context = _context(is_fresh)
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        store = f"{folder}/store"
        others: list[BaseProcess] = [
            context.Process(target=_follow, args=(rank, world, store, work), daemon=True)
            for rank in range(1, world)
        ]
        for process in others:
            process.start()
        try:
            _join_group(0, world, store)
            yield
            _leave(others)
        except (RuntimeError, ConnectionError) as error:
            raise _lost_rank(others, error) from error
        finally:
            for process in others:
                process.kill()
                process.join()
            if dist.is_initialized():  # after an error; nobody is left to wait for
                dist.destroy_process_group()


def _context(is_fresh: bool) -> ForkContext | ForkServerContext | SpawnContext:
    """How ranks start: forked from here or a server that imports once, but CUDA forbids forking."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    if is_fresh:
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    return context


def _require_devices(world: int) -> None:
    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and world > devices:
        what = f"the plan has {world} ranks, this machine has {devices} GPUs"
        raise PlanError(Problem(what, "a GPU for every rank", f"tp x pp x dp up to {devices}"))


def _leave(others: Sequence[BaseProcess]) -> None:
    """All ranks end together."""
    dist.destroy_process_group()
    for process in others:
        process.join(_GOODBYE_S)


def _follow(rank: int, world: int, store: str, work: Callable[[], object]) -> None:
    """The life of a rank other than 0. An error of ours is told by rank 0, which has it too."""
    gc.freeze()  # what was inherited is not this rank's to free
    try:
        _join_group(rank, world, store)
        work()
        dist.destroy_process_group()
    except TriptychError:
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        return
    sys.stderr.flush()
    os._exit(code)  # a broken process group may hang on a normal exit


def _join_group(rank: int, world: int, store: str) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // world))
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=_TIMEOUT,
        device_id=device,
    )


def _lost_rank(others: Sequence[BaseProcess], error: Exception) -> RunError:
    """Which rank to look at, if one is gone; else what this one says."""
    for process in others:
        process.join(1.0)
    ends = [
        f"rank {rank} ended with exit code {process.exitcode}"
        for rank, process in enumerate(others, start=1)
        if process.exitcode
    ]
    return RunError("; ".join(ends) or f"rank 0 failed: {error}")
