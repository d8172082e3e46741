"""Seconds and bytes of the collectives of one group of ranks.

Bytes are what a ring sends from each rank, which is the least possible (domain.md section 1).
Seconds are a start, latency by the steps of the ring, and bytes over the slowest link on the way.
A collective does not jump to the full rate at once: up to `ramp_s` seconds come on top, all of them
when it lasts much longer than that. With the numbers of `fabrics.csv` this fits NCCL's tables on
A100, H100 and B200 to 6-8 % in the median, from 512 bytes to 16 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from triptych.cluster.cluster import Cluster
from triptych.cluster.measured import Curve, messages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: how many, how many of them share a node, and over what.

    A collective between nodes uses the links of all members in a node at once; a message uses one.
    """

    size: int
    per_node: int
    latency_s: float  # of a step within a node
    network_latency_s: float  # of a step between nodes
    bytes_per_s: float  # attained by a rank in a collective
    alone_bytes_per_s: float  # attained by a rank alone, over the slowest link
    start_s: float
    ramp_s: float
    free_share: float = 1.0  # of a collective's seconds in which the devices can compute
    measured: Mapping[str, Curve] = field(default_factory=dict)  # by operation; counts instead

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.size / self.per_node)

    def on_one_port(self) -> Group:
        """The same group if members in a node do not share the work of leaving it."""
        rate = min(self.bytes_per_s, self.alone_bytes_per_s)
        return self if self.nodes == 1 else replace(self, bytes_per_s=rate)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds to sum `size_bytes` held by every rank, the faster of ring and tree latency."""
        if self.size == 1:
            return 0.0
        if "all_reduce" in self.measured:
            return self.measured["all_reduce"].at(size_bytes)
        hops = 2 * (self.nodes - 1)
        ring_s = (2 * (self.size - 1) - hops) * self.latency_s + hops * self.network_latency_s
        tree_s = 2 * (self.per_node - 1) * self.latency_s
        tree_s += 2 * math.ceil(math.log2(self.nodes)) * self.network_latency_s
        return (
            self.start_s
            + min(ring_s, tree_s)
            + self._wire_s(all_reduce_bytes(self.size, size_bytes))
        )

    def gather_s(self, size_bytes: float) -> float:
        """Seconds of an all-gather; `size_bytes` is the whole tensor."""
        return self._half_s("all_gather", size_bytes)

    def scatter_s(self, size_bytes: float) -> float:
        """Seconds of a reduce-scatter; `size_bytes` is the whole tensor."""
        return self._half_s("reduce_scatter", size_bytes)

    def _half_s(self, name: str, size_bytes: float) -> float:
        if self.size == 1:
            return 0.0
        if name in self.measured:
            return self.measured[name].at(size_bytes)
        hops = self.nodes - 1
        latency_s = (self.size - 1 - hops) * self.latency_s + hops * self.network_latency_s
        return self.start_s + latency_s + self._wire_s(gather_bytes(self.size, size_bytes))

    def all_to_all_s(self, size_bytes: float) -> float:
        """Seconds to exchange `size_bytes` held by every rank, a part of it for each other rank.

        What leaves the node leaves it over each rank's own link.
        """
        if self.size == 1:
            return 0.0
        if "all_to_all" in self.measured:
            return self.measured["all_to_all"].at(size_bytes)
        outside = (self.size - self.per_node) / self.size * size_bytes
        inside_s = self._wire_s(gather_bytes(self.size, size_bytes))
        return self.start_s + self._hop_latency_s + max(inside_s, outside / self.alone_bytes_per_s)

    def send_s(self, size_bytes: float) -> float:
        """Seconds from sending a message to a neighbour until it is there."""
        if self.size == 1:
            return 0.0
        if "send" in self.measured:
            return self.measured["send"].at(size_bytes)
        return self.start_s + self._hop_latency_s + size_bytes / self.alone_bytes_per_s

    @property
    def _hop_latency_s(self) -> float:
        return self.latency_s if self.nodes == 1 else self.network_latency_s

    def _wire_s(self, sent_bytes: float) -> float:
        seconds = sent_bytes / self.bytes_per_s
        if not self.ramp_s:
            return seconds
        return seconds - self.ramp_s * math.expm1(-seconds / self.ramp_s)


def all_reduce_bytes(size: int, size_bytes: float) -> float:
    """Bytes a rank sends in a ring all-reduce: 2 (n-1)/n S."""
    return 2 * (size - 1) / size * size_bytes


def gather_bytes(size: int, size_bytes: float) -> float:
    """Bytes a rank sends in an all-gather, reduce-scatter or all-to-all of S: (n-1)/n S."""
    return (size - 1) / size * size_bytes


def group(cluster: Cluster, size: int, stride: int) -> Group:
    """The group of `size` ranks, `stride` apart, that has it worst in a node-major rank order.

    A group fits in nodes only if nodes are made of whole groups; otherwise some group of the
    axis crosses nodes, and all wait for it.
    """
    within = min(cluster.groups, key=lambda nodes: nodes.link.bytes_per_s).link
    per_node = _members_in_a_node(cluster, size, stride)
    is_cpu = cluster.device.kind == "cpu"
    fits = per_node == size
    slowest = within if fits else cluster.network
    inside, outside = (
        link.bytes_per_s * (1.0 if is_cpu else link.efficiency)
        for link in (within, cluster.network)
    )
    return Group(
        size=size,
        per_node=per_node,
        latency_s=within.latency_s,
        network_latency_s=cluster.network.latency_s,
        bytes_per_s=inside if fits else min(inside, per_node * outside),
        alone_bytes_per_s=inside if fits else outside,
        start_s=slowest.start_s,
        ramp_s=slowest.ramp_s,
        free_share=_free_share(inside, inside if fits else outside) if is_cpu else 1.0,
        measured=messages_of(slowest.measured, size, slowest.latency_s)
        if size > 1 and (fits or per_node == 1)
        else {},
    )


def _free_share(processor: float, link: float) -> float:
    """Of a collective of processors, the part in which they only wait for the link.

    Within a node they move every byte themselves, at a rate of `processor`.
    """
    return max(0.0, 1.0 - link / processor)


def _members_in_a_node(cluster: Cluster, size: int, stride: int) -> int:
    node_sizes = [group.devices_per_node for group in cluster.groups]
    is_one_node = cluster.num_devices == node_sizes[0]
    if is_one_node or all(devices % (size * stride) == 0 for devices in node_sizes):
        return size
    together = max(1, min(node_sizes) // stride)
    return min(together, max(1, size // 2))
