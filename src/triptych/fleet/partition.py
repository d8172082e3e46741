"""How devices are cut into groups, and models into buckets of like latency.

A long request delays the short ones behind it (a convoy), so models whose latencies differ much may
get devices of their own. Source: AlpaServe (2302.11665), section 4.2, Algorithm 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.fleet.models import Fleet, Shape
from triptych.fleet.placement import Placement, empty

LIKE = 0.38  # latencies that differ by less than this share are never parted

Bucket = tuple[int, ...]  # numbers of models


def alike(fleet: Fleet, num_devices: int) -> Iterator[Placement]:
    """All devices in groups of one shape; what is left over in smaller ones of the same kind."""
    seen = set()
    for shape in fleet.shapes:
        if shape.devices <= num_devices:
            shapes = tuple(_cut(fleet.shapes, shape, num_devices))
            if shapes not in seen:
                seen.add(shapes)
                yield empty(shapes)


def _cut(shapes: Sequence[Shape], wanted: Shape, num_devices: int) -> Iterator[Shape]:
    """Groups of the wanted shape, then ever smaller ones, with its tensor ranks if possible."""
    left = num_devices
    smaller = [s for s in shapes if s.devices < wanted.devices]
    by_nearness = sorted(smaller, key=lambda s: (-s.devices, s.tensor != wanted.tensor, s.tensor))
    for shape in (wanted, *by_nearness):
        yield from itertools.repeat(shape, left // shape.devices)
        left %= shape.devices


def buckets(fleet: Fleet, most: int = 3) -> Iterator[tuple[Bucket, ...]]:
    """Ways to part the models by latency, from all together to `most` buckets."""
    order = sorted(range(len(fleet.models)), key=lambda m: fleet.models[m].alone_s)
    alone_s = [fleet.models[m].alone_s for m in order]
    steps = enumerate(itertools.pairwise(alone_s), start=1)
    cuts = [at for at, (low, high) in steps if high - low >= LIKE * low]
    for count in range(min(len(cuts), most - 1) + 1):
        for chosen in itertools.combinations(cuts, count):
            ends = (0, *chosen, len(order))
            yield tuple(tuple(order[a:b]) for a, b in itertools.pairwise(ends))


def divisions(
    loads: NDArray[np.float64], num_devices: int, slack: int
) -> Iterator[tuple[int, ...]]:
    """Devices for each bucket: near their shares of the load, each at least 1.

    Args:
        loads: device seconds that each bucket asks for.
        num_devices: to be divided.
        slack: how many devices a bucket may be away from its share.

    """
    if len(loads) == 1:
        yield (num_devices,)
        return
    shares = loads / loads.sum() * num_devices
    spans = [
        range(max(1, round(share) - slack), min(num_devices, round(share) + slack) + 1)
        for share in shares[:-1]
    ]
    for counts in itertools.product(*spans):
        last = num_devices - sum(counts)
        if last >= 1 and abs(last - shares[-1]) <= slack + 1:
            yield (*counts, last)
