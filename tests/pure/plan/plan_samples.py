"""Small models and clusters for the tests of plans."""

from __future__ import annotations

from triptych.cluster.cluster import Cluster, Device, Link, NodeGroup
from triptych.model.model import Attention, Block, Experts, Mlp, Model


def make_model(
    *,
    layers: int = 4,
    query_heads: int = 8,
    kv_heads: int = 2,
    mlp: Mlp | Experts | None = None,
    vocab: int = 512,
    learned_positions: bool = False,
) -> Model:
    attention = Attention(query_heads=query_heads, kv_heads=kv_heads, head_dim=8)
    block = Block(attention=attention, mlp=mlp or Mlp(width=160))
    return Model(
        name="tiny",
        family="llama",
        hidden=64,
        blocks=(block,) * layers,
        vocab=vocab,
        tied=False,
        max_position=128,
        learned_positions=learned_positions,
    )


def make_cluster(devices: int, kind: str = "cpu", per_node: int | None = None) -> Cluster:
    link = Link(name="link", latency_s=1e-5, bytes_per_s=1e9)
    device = Device(
        name=kind, kind=kind, memory_bytes=1e10, memory_bytes_per_s=1e10, peak_flops={"fp32": 1e11}
    )
    per_node = per_node or devices
    group = NodeGroup(
        nodes=devices // per_node, devices_per_node=per_node, device=device, link=link
    )
    return Cluster(name=f"{devices}x{kind}", groups=(group,), network=link)
