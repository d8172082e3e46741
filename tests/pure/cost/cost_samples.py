"""Small models and clusters whose costs are easy to count by hand."""

from __future__ import annotations

from typing import Any

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.cost.frame import Frame
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload


def llama(
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    width: int = 176,
    vocab: int = 512,
    tied: bool = False,
    experts: Experts | None = None,
    dropout: bool = False,
) -> Model:
    attention = Attention(query_heads=heads, kv_heads=kv_heads, head_dim=hidden // heads)
    block = Block(attention=attention, mlp=experts or Mlp(width=width))
    return Model(
        name="sample",
        family="llama",
        hidden=hidden,
        blocks=(block,) * layers,
        vocab=vocab,
        tied=tied,
        max_position=4096,
        dropout=dropout,
    )


def cluster(
    devices: int = 8,
    *,
    nodes: int = 1,
    kind: str = "cuda",
    memory_bytes: float = 80 * 1024**3,
    memory_bytes_per_s: float = 2e12,
    flops: float = 300e12,
    link_bytes_per_s: float = 300e9,
    network_bytes_per_s: float = 25e9,
    latency_s: float = 2e-6,
) -> Cluster:
    """`nodes` nodes of `devices` devices each."""
    device = Device(
        name="sample",
        kind=kind,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops={"bf16": flops, "fp32": flops / 8},
    )
    link = Link(name="inside", latency_s=latency_s, bytes_per_s=link_bytes_per_s)
    network = Link(name="between", latency_s=2 * latency_s, bytes_per_s=network_bytes_per_s)
    group = NodeGroup(nodes=nodes, devices_per_node=devices, device=device, link=link)
    return Cluster(name="sample", groups=(group,), network=network)


def work(sequence_length: int = 128, global_batch: int = 16) -> Workload:
    return Workload(sequence_length=sequence_length, global_batch=global_batch)


def plan(model: Model, **settings: Any) -> Plan:
    """A uniform plan in bf16 unless `precision` says otherwise."""
    settings.setdefault("precision", Precision.mixed())
    return Plan.uniform(model.num_layers, **settings)


def frame_of(
    model: Model, chosen: Plan, where: Cluster | None = None, workload: Workload | None = None
) -> Frame:
    where = where or cluster(chosen.world_size)
    return Frame.of(Pricer(model, where, workload or work()), chosen)


def setting(**changes: Any) -> Setting:
    """One GPU, one sequence, nothing recomputed, fused kernels, bf16."""
    base = Setting(
        tensor=1,
        context=1,
        expert=1,
        sequence_parallel=False,
        microbatch=1,
        recompute="none",
        attention="flash",
        compile=True,
        dtype="bf16",
    )
    return base._replace(**changes)
