"""Kernels of serving: products with weights read once, attention over a cache, small all-reduces.

A product of few rows takes the time to read its weights; the tiles of `cost/gemm.py` say when
arithmetic takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.collectives import Group, group
from triptych.cost.kernels.gemm import KERNEL_S, joined_s, lasting_s, tiled_s
from triptych.cost.kernels.rates import Rates

PEER_LINKS = ("NVLink", "xGMI")
"""Links over which a device reads another's memory."""


def product_s(
    rates: Rates, m: float, k: float, n: float, *, weight_bytes: float, copies: float = 1.0
) -> float:
    """Seconds of (m x k)(k x n) with `weight_bytes` a weight; `copies` experts of m rows each."""
    if m <= 0 or n <= 0 or copies <= 0:
        return 0.0
    moved_bytes = copies * (k * n * weight_bytes + m * (k + n) * rates.element_bytes)
    moving_s = moved_bytes / rates.read_bytes_per_s
    if not rates.multiprocessors:
        return joined_s(2.0 * m * k * n * copies / rates.gemm_flops, moving_s)
    return joined_s(lasting_s(rates, tiled_s(rates, m, k, n, copies)), moving_s) + KERNEL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """Tensor-parallel ranks of a layer; `one_shot_s` 0 where no rank reads its peers' memory."""

    group: Group
    one_shot_s: float
    share: float = 1.0  # of the link's rate that a ring over a shared bus attains

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to sum: every rank reads all others' at once where that is faster than a ring."""
        size = self.group.size
        if size == 1:
            return 0.0
        ring_s = self.group.all_reduce_s(size_bytes / self.share)
        if not self.one_shot_s:
            return ring_s
        read_bytes = min((size - 1) * size_bytes, 2.0 * size_bytes + size * TWO_SHOT_BYTES)
        return min(ring_s, self.one_shot_s + read_bytes / self.group.bytes_per_s)


TWO_SHOT_BYTES = 131072
"""Bytes for each rank that a second round over peers' memory is worth."""


def reducer(cluster: Cluster, tensor: int, one_shot_s: float) -> Reducer:
    """How `tensor` neighbouring ranks sum."""
    ranks = group(cluster, tensor, 1)
    has_peers = cluster.groups[0].link.name.startswith(PEER_LINKS) and ranks.nodes == 1
    is_bus = tensor > 2 and cluster.groups[0].link.name.startswith("PCIe")
    return Reducer(
        group=ranks,
        one_shot_s=one_shot_s if has_peers else 0.0,
        share=BUS_SHARE if is_bus else 1.0,
    )


BUS_SHARE = 0.6
"""Devices on PCIe share bridges and the link between sockets when more than two form a ring."""
