"""Entries of ranks in which one of them fails: rank 2 at step 3, each in another way."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch

from triptych.checkpoint import write
from triptych.runtime.build.stage import StageModule
from triptych.runtime.engine import Engine, MicroBatch, StepResult
from triptych.runtime.shard import Shard
from triptych.train import preflight, worker
from triptych.train.data import Arrays, TrainingData
from triptych.train.result import Summary

BAD_RANK, BAD_STEP = 2, 3
TEXT = "the unique text of this failure"


def is_bad_rank() -> bool:
    return int(os.environ["RANK"]) == BAD_RANK


def failing(folder: str) -> None:
    """Leaves the time at which the failure begins."""
    Path(folder, "failing").write_text(str(time.time()))


def in_step(folder: str, fail: Callable[[], None], everywhere: bool = False) -> Summary:
    """Runs a rank; `fail` is called before step 3 on rank 2 (or on every rank)."""
    whole, calls = Engine.step, 0

    def step(
        engine: Engine, microbatches: Sequence[MicroBatch], rate: float, flag: bool = False
    ) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            fail()
        return whole(engine, microbatches, rate, flag)

    if everywhere or is_bad_rank():
        Engine.step = step  # type: ignore[method-assign]
    return worker.run_rank(folder)


def raises_in_forward(folder: str) -> Summary:
    """In the second micro-batch of the step, with the other ranks in the middle of theirs."""
    whole, left = StageModule.forward, [1]

    def forward(stage: StageModule, *args: Any, **options: Any) -> Any:
        if not left:
            raise ValueError(TEXT)
        left.pop()
        return whole(stage, *args, **options)

    def fail() -> None:
        StageModule.forward = forward  # type: ignore[method-assign]

    return in_step(folder, fail)


def is_killed(folder: str) -> Summary:
    return in_step(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def leaves_silently(folder: str) -> Summary:
    return in_step(folder, lambda: os._exit(0))


def exits_politely(folder: str) -> Summary:
    return in_step(folder, lambda: sys.exit(0))


def all_leave_silently(folder: str) -> Summary:
    return in_step(folder, lambda: os._exit(0), everywhere=True)


def runs_out_of_memory(folder: str) -> Summary:
    """The address space ends some pages from here, and torch asks for more."""

    def allocate() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = (pages + 1000) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.zeros(1 << 30)

    return in_step(folder, allocate)


def in_data(folder: str, fault: Callable[[], None]) -> Summary:
    """A fault on one rank while it takes the data of step 3."""
    whole, calls = TrainingData.microbatches, 0

    def microbatches(data: TrainingData, position: int) -> list[Arrays]:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            fault()
        return whole(data, position)

    if is_bad_rank():
        TrainingData.microbatches = microbatches  # type: ignore[method-assign]
    return worker.run_rank(folder)


def raises_in_data(folder: str) -> Summary:
    def fault() -> None:
        raise OSError(TEXT)

    return in_data(folder, fault)


def raises_in_saving(folder: str) -> Summary:
    whole, calls = write.write_shards, 0

    def write_shards(temporary: Any, rank: int, shards: Sequence[Shard]) -> Any:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            raise ValueError(TEXT)
        return whole(temporary, rank, shards)

    if is_bad_rank():
        write.write_shards = write_shards
    return worker.run_rank(folder)


def has_infinite_gradient(folder: str, steps: Sequence[int] = (BAD_STEP,)) -> Summary:
    """An infinite weight gradient on one rank at step 3 (or others) of a launch."""
    whole, calls = Engine.gradients, 0

    def gradients(engine: Engine, microbatches: Sequence[MicroBatch]) -> Any:
        nonlocal calls
        calls += 1
        result = whole(engine, microbatches)
        if calls in steps:
            engine.buckets.buckets[0].gradients[0] = float("inf")
        return result

    if is_bad_rank():
        Engine.gradients = gradients  # type: ignore[method-assign]
    return worker.run_rank(folder)


def has_infinite_gradient_at_7(folder: str) -> Summary:
    return has_infinite_gradient(folder, (7,))


def has_infinite_gradients_from_3_to_6(folder: str) -> Summary:
    return has_infinite_gradient(folder, (3, 4, 5, 6))


def has_a_flipped_bit(folder: str) -> Summary:
    """One element of the last norm changes on one rank after step 3, as a faulty memory does."""
    whole, calls = Engine.step, 0

    def step(
        engine: Engine, microbatches: Sequence[MicroBatch], rate: float, flag: bool = False
    ) -> StepResult:
        nonlocal calls
        calls += 1
        result = whole(engine, microbatches, rate, flag)
        if calls == BAD_STEP:
            shards = [s for s in engine.shards() if s.kind == "weight"]
            next(s for s in shards if s.name == "model.norm.weight").tensor[0] += 1e-6
        return result

    if is_bad_rank():
        Engine.step = step  # type: ignore[method-assign]
    return worker.run_rank(folder)


def in_save(fail: Callable[[int, Path], None], bad_rank: int = BAD_RANK) -> None:
    """`fail` is called on a rank ahead of each write of its shards, with their count and folder."""
    whole, calls = write.write_shards, 0

    def write_shards(temporary: Path, rank: int, shards: Sequence[Shard]) -> Any:
        nonlocal calls
        calls += 1
        fail(calls, temporary)
        return whole(temporary, rank, shards)

    if int(os.environ["RANK"]) == bad_rank:
        write.write_shards = write_shards


def write_fails_once(folder: str) -> Summary:
    """The second write of one rank fails, and no other."""

    def fail(count: int, _: Path) -> None:
        if count == 2:
            raise OSError(errno.EIO, TEXT)

    in_save(fail)
    return worker.run_rank(folder)


def no_room_at_step_4(folder: str) -> Summary:
    """The disk is full for one rank when step 4 is saved."""

    def fail(_: int, temporary: Path) -> None:
        if temporary.name.startswith("step-00000004"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    in_save(fail)
    return worker.run_rank(folder)


def has_a_quota(folder: str) -> Summary:
    """One rank may not write files of more than some bytes from the third save on."""

    def fail(count: int, _: Path) -> None:
        if count == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    in_save(fail)
    return worker.run_rank(folder)


def disk_turns_read_only(folder: str) -> Summary:
    """The mount of the checkpoints is read-only from the third save on; needs root."""
    whole, calls = write._begin, 0

    def begin(checkpoints: Path, step: int, needed_bytes: int) -> Path:
        nonlocal calls
        calls += 1
        if calls == 3:
            subprocess.run(["mount", "-o", "remount,ro", checkpoints.parent], check=True)
        return whole(checkpoints, step, needed_bytes)

    write._begin = begin
    return worker.run_rank(folder)


def hangs_in_data(folder: str) -> Summary:
    """One rank never comes back from its data."""
    return in_data(folder, wait_forever)


def wait_forever() -> None:
    while True:
        time.sleep(1.0)


def is_stopped(folder: str) -> Summary:
    """The system stops one rank in the middle of a step, as a debugger would."""
    return in_step(folder, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def is_asked_to_end(folder: str) -> Summary:
    """One rank gets SIGTERM in step 3."""
    return in_step(folder, lambda: os.kill(os.getpid(), signal.SIGTERM))


def asks_the_launcher(folder: str, number: int = signal.SIGUSR1) -> Summary:
    """The launcher gets a signal in step 3, and again while the ranks save."""
    whole = write.write_shards

    def write_shards(*args: Any) -> Any:
        os.kill(launcher, number)
        return whole(*args)

    parent = parent_process()
    assert parent is not None and parent.pid is not None
    launcher = parent.pid

    def ask() -> None:
        os.kill(launcher, number)
        time.sleep(1.0)  # until it has been passed on

    write.write_shards = write_shards
    return in_step(folder, ask)


def terminates_the_launcher(folder: str) -> Summary:
    return asks_the_launcher(folder, signal.SIGTERM)


def is_slow(folder: str) -> Summary:
    """One rank's matrix products take longer before the first step."""
    whole = preflight._gemm

    def gemm(device: torch.device) -> Callable[[], object]:
        product = whole(device)
        return lambda: [product() for _ in range(20)]

    if is_bad_rank():
        preflight._gemm = gemm
    return worker.run_rank(folder)
