"""A short check before the first step: slow ranks and links, room on the disk and in memory."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from triptych.checkpoint.attempts import free_bytes
from triptych.errors import CheckpointError, Problem
from triptych.train.memory import available_bytes, gathered
from triptych.units import format_bytes

SLOW = 1.8
"""Times the median beyond which a rank or link is named."""
_TRIES = 4  # the best counts: other work on the machine slows single tries
_SIZES = {"cpu": 384, "cuda": 4096}  # of a square matrix: a few milliseconds
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_RING_BYTES = {"cpu": 1 << 18, "cuda": 1 << 25}
_LEAST_S = 1e-3  # below it differences are noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one rank has measured: its best times and what it has."""

    host: str
    gemm_s: float
    ring_s: float | None  # from the rank before it; None: it is alone
    free_memory_bytes: int


def probe(device: torch.device) -> Probe:
    """Measures this rank and the link from the rank before it; collective over all ranks."""
    return Probe(
        host=socket.gethostname(),
        gemm_s=_best(_gemm(device), device),
        ring_s=_ring(device) if dist.is_initialized() else None,
        free_memory_bytes=available_bytes(device),
    )


def probe_all(device: torch.device) -> list[Probe]:
    """The probes of all ranks; collective."""
    return gathered(probe(device))


def _gemm(device: torch.device) -> Callable[[], object]:
    size, dtype = _SIZES[device.type], _DTYPES[device.type]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    return lambda: torch.mm(matrix, matrix, out=out)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """The least seconds of a few calls after a first one.

    On CPUs those of the processor: ranks that share its cores are not slow for it.
    """
    work()
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return min(_seconds(work, device, clock) for _ in range(_TRIES))


def _seconds(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    _finish(device)
    begun_s = clock()
    work()
    _finish(device)
    return clock() - begun_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ring(device: torch.device) -> float:
    """Seconds of the exchange in which each rank sends to the next and receives from the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.zeros(_RING_BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def turn() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    turn()
    best_s = float("inf")
    for _ in range(_TRIES):
        dist.barrier()
        best_s = min(best_s, _seconds(turn, device))
    return best_s


# ---- what to say -------------------------------------------------------------------------------


def speed_lines(probes: Sequence[Probe], device: str) -> list[str]:
    """How fast ranks and links are; a warning names each that is far slower than most."""
    gemm = [probe.gemm_s for probe in probes]
    flops = 2 * _SIZES[device] ** 3
    slowest = max(range(len(gemm)), key=gemm.__getitem__)
    line = f"pre-flight: matrix product {flops / statistics.median(gemm) / 1e9:.0f} GFLOP/s"
    if len(probes) > 1:
        line += f" (rank {slowest}: {flops / gemm[slowest] / 1e9:.0f})"
    ring = [probe.ring_s for probe in probes if probe.ring_s is not None]
    if ring:
        rate = _RING_BYTES[device] / statistics.median(ring) / 1e6
        last = max(range(len(ring)), key=ring.__getitem__)
        worst = _RING_BYTES[device] / ring[last] / 1e6
        line += f", ring {rate:.0f} MB/s (link {_link(last, len(ring))}: {worst:.0f})"
    return [line, *_slow_ranks(probes), *_slow_links(probes)]


def _slow_ranks(probes: Sequence[Probe]) -> Iterator[str]:
    median_s = statistics.median(probe.gemm_s for probe in probes)
    for rank, found in enumerate(probes):
        if _is_slow(found.gemm_s, median_s):
            yield (
                f"warning: rank {rank} on {found.host} is slow: a matrix product takes "
                f"{found.gemm_s / median_s:.1f} times the median; all ranks will wait for it"
            )


def _slow_links(probes: Sequence[Probe]) -> Iterator[str]:
    times = [probe.ring_s or 0.0 for probe in probes]
    median_s = statistics.median(times)
    for rank, seconds in enumerate(times):
        if _is_slow(seconds, median_s):
            before = probes[rank - 1].host
            yield (
                f"warning: the link from rank {_link(rank, len(times))} ({before} to "
                f"{probes[rank].host}) is slow: {seconds / median_s:.1f} times the median"
            )


def _is_slow(seconds: float, median_s: float) -> bool:
    return seconds > SLOW * median_s and seconds - median_s > _LEAST_S


def _link(rank: int, size: int) -> str:
    return f"{(rank - 1) % size} to {rank}"


def disk_lines(folder: Path, checkpoint_bytes: int, copies: int, copy_bytes: int) -> list[str]:
    """What checkpoints need and what is free.

    `copies` lie on the disk at a time at most; `copy_bytes` is the host memory of snapshots. Raises
    CheckpointError if there is no room for a single one.
    """
    free = free_bytes(folder)
    need = f"a checkpoint needs {format_bytes(checkpoint_bytes)}"
    if checkpoint_bytes > free:
        what = f"{need} ({checkpoint_bytes} bytes), {folder} has {free} bytes free"
        works = "free some space, or another [checkpoint] folder"
        raise CheckpointError(Problem(what, "a run can save what it has trained", works))
    line = f"{need}, {copies} at a time {format_bytes(copies * checkpoint_bytes)}"
    lines = [f"{line}; free in {folder}: {format_bytes(free)}"]
    if copies * checkpoint_bytes > free:
        lines.append("warning: the disk may fill: fewer [checkpoint] keep_last, or another folder")
    if copy_bytes:
        lines.append(f"saves beside the training keep {format_bytes(copy_bytes)} in host memory")
    return lines


def memory_lines(
    probes: Sequence[Probe], predicted_bytes: float | None, *, shared: bool
) -> list[str]:
    """Predicted peak against what is free; on CPUs the ranks of a host share what it has."""
    if predicted_bytes is None:
        return []
    lines: list[str] = []
    for host in dict.fromkeys(found.host for found in probes):
        ranks = [found for found in probes if found.host == host]
        free = min(found.free_memory_bytes for found in ranks) / (len(ranks) if shared else 1)
        if not lines:
            lines.append(
                f"memory: predicted peak {format_bytes(predicted_bytes)} a rank, "
                f"free {format_bytes(free)} a rank"
            )
        if predicted_bytes > free:
            lines.append(
                f"warning: {host} has {format_bytes(free)} free for each of its {len(ranks)} ranks,"
                f" less than the predicted {format_bytes(predicted_bytes)}"
            )
    return lines
