"""Entries of ranks in which one of them fails: rank 2 at step 3, each in another way."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from triptych.checkpoint import write
from triptych.runtime.build.stage import StageModule
from triptych.runtime.engine import Engine, MicroBatch, StepResult
from triptych.runtime.shard import Shard
from triptych.train import worker
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

    def step(engine: Engine, microbatches: Sequence[MicroBatch], rate: float) -> StepResult:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            fail()
        return whole(engine, microbatches, rate)

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


def raises_in_data(folder: str) -> Summary:
    whole, calls = TrainingData.microbatches, 0

    def microbatches(data: TrainingData, position: int) -> list[Arrays]:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            raise OSError(TEXT)
        return whole(data, position)

    if is_bad_rank():
        TrainingData.microbatches = microbatches  # type: ignore[method-assign]
    return worker.run_rank(folder)


def raises_in_saving(folder: str) -> Summary:
    whole, calls = write.write_shards, 0

    def write_shards(temporary: Any, rank: int, shards: Sequence[Shard]) -> Any:
        nonlocal calls
        calls += 1
        if calls == BAD_STEP:
            failing(folder)
            raise OSError(TEXT)
        return whole(temporary, rank, shards)

    if is_bad_rank():
        write.write_shards = write_shards
    return worker.run_rank(folder)


def has_infinite_gradient(folder: str) -> Summary:
    """An infinite weight gradient on one rank at step 3."""
    whole, calls = Engine.gradients, 0

    def gradients(engine: Engine, microbatches: Sequence[MicroBatch]) -> Any:
        nonlocal calls
        calls += 1
        result = whole(engine, microbatches)
        if calls == BAD_STEP:
            engine.buckets.buckets[0].gradients[0] = float("inf")
        return result

    if is_bad_rank():
        Engine.gradients = gradients  # type: ignore[method-assign]
    return worker.run_rank(folder)


def has_a_flipped_bit(folder: str) -> Summary:
    """One element of the last norm changes on one rank after step 3, as a faulty memory does."""
    whole, calls = Engine.step, 0

    def step(engine: Engine, microbatches: Sequence[MicroBatch], rate: float) -> StepResult:
        nonlocal calls
        calls += 1
        result = whole(engine, microbatches, rate)
        if calls == BAD_STEP:
            shards = [s for s in engine.shards() if s.kind == "weight"]
            next(s for s in shards if s.name == "model.norm.weight").tensor[0] += 1e-6
        return result

    if is_bad_rank():
        Engine.step = step  # type: ignore[method-assign]
    return worker.run_rank(folder)
