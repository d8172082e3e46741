"""Small models and clusters to plan for."""

from __future__ import annotations

from dataclasses import replace

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.plan.workload import Workload


def tiny(
    *,
    layers: int = 6,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 16,
    hidden: int = 128,
    width: int = 344,
    vocab: int = 2003,
    tied: bool = False,
    experts: Experts | None = None,
) -> Model:
    attention = Attention(query_heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    block = Block(attention=attention, mlp=experts or Mlp(width=width))
    return Model(
        name="tiny",
        family="llama",
        hidden=hidden,
        blocks=(block,) * layers,
        vocab=vocab,
        tied=tied,
        max_position=65536,
    )


def cpus(ranks: int, memory_bytes: float = 4e9) -> Cluster:
    """One machine, gloo."""
    device = Device(
        name="core",
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1e10,
        peak_flops={"fp32": 5e10},
        operator_s=1e-5,
    )
    link = Link(name="loopback", latency_s=5e-5, bytes_per_s=1e9)
    group = NodeGroup(nodes=1, devices_per_node=ranks, device=device, link=link)
    return Cluster(name=f"{ranks} cores", groups=(group,), network=link)


def gpus(
    nodes: int,
    per_node: int,
    *,
    memory_bytes: float = 8e9,
    link_bytes_per_s: float = 300e9,
    network_bytes_per_s: float = 25e9,
) -> Cluster:
    """Nodes of small GPUs."""
    device = Device(
        name="gpu",
        kind="cuda",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=2e12,
        peak_flops={"bf16": 300e12, "fp32": 20e12},
    )
    link = Link(name="inside", latency_s=2e-6, bytes_per_s=link_bytes_per_s)
    network = Link(name="between", latency_s=4e-6, bytes_per_s=network_bytes_per_s)
    group = NodeGroup(nodes=nodes, devices_per_node=per_node, device=device, link=link)
    return Cluster(name=f"{nodes}x{per_node}", groups=(group,), network=network)


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    group = cluster.groups[0]
    device = replace(group.device, memory_bytes=memory_bytes)
    return replace(cluster, groups=(replace(group, device=device),))


def work(global_batch: int = 8, sequence_length: int = 128) -> Workload:
    return Workload(sequence_length=sequence_length, global_batch=global_batch)
