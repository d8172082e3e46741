"""How fast the machine is at the moment: three short probes, against those of its calibration.

Machines that others use, and clocks that follow the heat, drift by tens of per cent in minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from triptych.cluster.cluster import Cluster, Link
from triptych.cluster.measured import slower
from triptych.measure.watch import Watch
from triptych.runtime.comm import Communicator, Counters

REPEATS, CALLS, MESSAGES = 3, 4, 12
PRODUCT = (256, 512, 1024)  # rows, inner dimension, columns
MOVED = 1 << 20  # elements of each of three tensors
MESSAGE_BYTES = 1 << 20


class Pace(NamedTuple):
    """Seconds of a product, of a memory-bound operator and of a gather over all ranks."""

    product_s: float
    operator_s: float
    message_s: float


def pace(watch: Watch, message_bytes: int = MESSAGE_BYTES) -> Pace:
    """The pace of the ranks at the moment, means over them; collective, tenths of a second."""
    rows, inner, columns = PRODUCT
    x = torch.ones(rows, inner, device=watch.device)
    weight, out = torch.ones(columns, inner, device=watch.device), torch.empty(rows, columns)
    one, other, moved = (torch.ones(MOVED, device=watch.device) for _ in range(3))
    out = out.to(watch.device)
    world = watch.place.world
    group = dist.group.WORLD if world > 1 else None
    comm = Communicator("drift", range(world), watch.place.rank, group, Counters())
    whole = torch.zeros(world, message_bytes // 4 // world, device=watch.device)

    def product() -> None:
        torch.mm(x, weight.T, out=out)

    def once() -> tuple[float, ...]:
        return (
            watch.seconds(product, CALLS),
            watch.seconds(lambda: torch.mul(one, other, out=moved), CALLS),
            watch.seconds(
                lambda: comm.all_gather(whole[comm.index], whole.view(-1)), MESSAGES, product
            ),
        )

    found = [once() for _ in range(REPEATS)]
    medians = [[statistics.median(values) for values in zip(*found, strict=True)]]
    (merged,) = watch.of_all(medians, statistics.fmean)
    return Pace(*merged)


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """The mean of several."""
    return Pace(*(statistics.fmean(values) for values in zip(*paces, strict=True)))


def at_pace(cluster: Cluster, calibrated: Pace, now: Pace) -> Cluster:
    """A calibrated cluster as fast as it is now."""
    product, operator, message = (b / a for a, b in zip(calibrated, now, strict=True))
    groups = []
    for group in cluster.groups:
        device = group.device
        if device.measured is not None:
            device = replace(
                device,
                measured=device.measured.times(product, operator),
                memory_bytes_per_s=device.memory_bytes_per_s / operator,
                read_bytes_per_s=device.read_bytes_per_s / operator,
            )
        groups.append(replace(group, device=device, link=_slower(group.link, message)))
    return replace(cluster, groups=tuple(groups), network=_slower(cluster.network, message))


def _slower(link: Link, factor: float) -> Link:
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bytes_per_s=link.bytes_per_s / factor,
        measured=slower(link.measured, factor),
    )
