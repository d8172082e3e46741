"""Collectives and messages through the runtime's own communicators, by group and size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from triptych.measure.kernels import Found
from triptych.measure.watch import Place, Row, Watch, in_rounds
from triptych.runtime.comm import Communicator, Counters

SIZES = tuple(1 << power for power in (10, 14, 17, 19, 20, 22, 24))
CUDA_SIZES = (*SIZES, 1 << 26, 1 << 28)
CALLS_BYTES = 8 << 20  # so many bytes, in so many calls at most, tell the time of a size
MOST_CALLS, LEAST_CALLS = 20, 2

WORK = (128, 512, 1024)
"""Rows, inner dimension, columns of a product between two messages: milliseconds of a core."""

LEFT_OVER_S = 1e-9
"""What a rank that is in no group of a size says."""

TOO_LONG_S = 0.3
"""A size that takes longer is the last one: what is longer takes as much longer."""


def mean_of_members(seconds: Sequence[float]) -> float:
    """The mean over ranks, without those that no group has.

    A rank's time has its wait for the others in it. Mean work and mean message together are so as
    long as all ranks take for both.
    """
    return statistics.fmean([s for s in seconds if s != LEFT_OVER_S] or [LEFT_OVER_S])


def group_sizes(place: Place, between_nodes: bool) -> list[int]:
    """Sizes of the groups to measure: 2, 4, 8, ... and all, within a node or one rank a node."""
    most = place.nodes if between_nodes else place.per_node
    sizes = []
    size = 2
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most] if most > 1 else []


def groups(place: Place, size: int, between_nodes: bool) -> list[tuple[int, ...]]:
    """The groups of a size; all of them work at once, as those of an axis do."""
    if between_nodes:
        columns = [range(i, place.world, place.per_node) for i in range(place.per_node)]
    else:
        columns = [range(i, i + place.per_node) for i in range(0, place.world, place.per_node)]
    return [
        tuple(ranks[start : start + size])
        for ranks in columns
        for start in range(0, len(ranks) - size + 1, size)
    ]


def messages(watch: Watch, name: str, between_nodes: bool) -> Found:
    """Ranks, bytes: seconds of an operation."""
    rows: list[Row] = []
    noises = [0.0]
    for size in group_sizes(watch.place, between_nodes):
        if name == "send" and size > 2:
            continue
        comm = _communicator(watch.place, groups(watch.place, size, between_nodes))
        measured = partial(_seconds, watch, comm, name)
        found, noise = in_rounds(list(_points(watch, measured, size)), measured)
        rows += found
        noises.append(noise)
    return rows, max(noises)


def _communicator(place: Place, members: Sequence[tuple[int, ...]]) -> Communicator | None:
    """This rank's communicator; None if it is left over. Collective over all ranks."""
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks))
        if place.rank in ranks:
            mine = Communicator("measure", ranks, ranks.index(place.rank), group, Counters())
    return mine


def _points(watch: Watch, measured: Callable[[Row], Row], ranks: int) -> Iterator[Row]:
    for size in CUDA_SIZES if watch.device.type == "cuda" else SIZES:
        point = [float(ranks), float(size)]
        yield point
        if watch.largest(measured(point)[0]) > TOO_LONG_S:
            return


def _seconds(watch: Watch, comm: Communicator | None, name: str, point: Row) -> Row:
    ranks, size = int(point[0]), int(point[1])
    count = max(LEAST_CALLS, min(MOST_CALLS, CALLS_BYTES // size))
    if comm is None:
        watch.together()
        return [LEFT_OVER_S]
    elements = max(1, size // 4 // ranks)
    call = _call(comm, name, torch.zeros(ranks * elements, device=watch.device))
    seconds = watch.seconds(call, count, _work(watch.device))
    return [seconds / 2.0 if name == "send" else seconds]


def _work(device: torch.device) -> Callable[[], object]:
    """What ranks do between two messages of a step: they do not end it at the same moment."""
    rows, inner, columns = WORK
    x, weight = torch.ones(rows, inner, device=device), torch.ones(columns, inner, device=device)
    out = torch.empty(rows, columns, device=device)
    return lambda: torch.mm(x, weight.T, out=out)


def _call(comm: Communicator, name: str, whole: torch.Tensor) -> Callable[[], object]:
    """An operation on a tensor that is `whole` when it is together."""
    parts = whole.view(comm.size, -1)
    if name == "all_reduce":
        return lambda: comm.all_reduce(whole)
    if name == "all_gather":
        return lambda: comm.all_gather(parts[comm.index], whole)
    if name == "reduce_scatter":
        return lambda: comm.start_reduce_scatter(whole, parts[comm.index]).wait()
    if name == "all_to_all":
        return lambda: comm.all_to_all(parts)
    return lambda: _forth_and_back(comm, whole)


def _forth_and_back(comm: Communicator, tensor: torch.Tensor) -> None:
    """A message from the first rank to the second, and one as long the other way."""
    if comm.index == 0:
        comm.start_send(tensor, 1).wait()
        comm.start_receive(tensor, 1).wait()
    else:
        comm.start_receive(tensor, 0).wait()
        comm.start_send(tensor, 0).wait()
