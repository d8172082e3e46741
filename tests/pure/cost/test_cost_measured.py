"""A device that was measured is priced from its points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.cluster.cluster import Cluster
from triptych.cluster.measured import Curve, Grid, Kernels, Measured
from triptych.cluster.measured_toml import OPERATORS
from triptych.cluster.text import parse_cluster
from triptych.cost.kernels.attention import flash_s
from triptych.cost.kernels.collectives import group
from triptych.cost.kernels.gemm import gemm_s
from triptych.cost.kernels.rates import rates
from triptych.cost.operators import measured_as
from triptych.cost.predict import predict
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.model.operators import block_operators, embedding_operators
from triptych.plan.plan import Plan
from triptych.plan.workload import Workload

FLOPS, MOVED_S, UPDATED_S = 1e10, 1e-9, 2e-9
SENT_S = {"all_reduce": 4e-9, "all_gather": 2e-9, "reduce_scatter": 3e-9, "all_to_all": 5e-9}


def line(seconds_each: float) -> Curve:
    """Seconds in proportion to size."""
    return Curve(sizes=(1e-9, 1.0), seconds=(seconds_each * 1e-9, seconds_each))


def flat(dimensions: int) -> Grid:
    return Grid(axes=((1.0,),) * dimensions, rates=(FLOPS,))


def cluster(ranks: int, factor: float = 1.0) -> Cluster:
    """CPUs that do FLOPS in products, and whose other work takes seconds by the element."""
    base = parse_cluster(f"1x{ranks}xcpu")
    node = base.groups[0]
    kernels = Kernels(
        products=flat(3),
        attention=(flat(2), flat(2)),
        operators={name: (line(MOVED_S), line(2 * MOVED_S)) for name in OPERATORS},
    )
    measured = Measured(
        threads=1, host_s=(1e-12, 1e-12), optimizer=line(UPDATED_S), kernels={"fp32": kernels}
    ).times(factor, factor)
    messages = {name: {2: line(each)} for name, each in SENT_S.items()}
    device = replace(node.device, measured=measured, memory_bytes_per_s=1e18)
    link = replace(node.link, measured=messages)
    return replace(base, groups=(replace(node, device=device, link=link),), network=link)


def small() -> Model:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    return from_config(config, "small")


def test_products_and_attention_take_their_flops_over_the_measured_rate() -> None:
    priced = rates(cluster(1).device, "fp32")
    assert gemm_s(priced, 32, 64, 128, 3) == pytest.approx(2 * 32 * 64 * 128 * 3 / FLOPS)
    pair = flash_s(priced, 2, heads=4, width=32, context=64, tokens=128)
    assert pair == pytest.approx((2 * 4 * 32 * 64 * 128 / FLOPS,) * 2)


def test_messages_take_the_measured_seconds() -> None:
    two = group(cluster(2), 2, 1)
    assert two.all_reduce_s(1e6) == pytest.approx(4e-3)
    assert two.gather_s(1e6) == pytest.approx(2e-3)
    assert two.scatter_s(1e6) == pytest.approx(3e-3)
    assert two.all_to_all_s(1e6) == pytest.approx(5e-3)


def test_every_memory_bound_operator_has_a_measured_kind() -> None:
    model = small()
    for op in (*block_operators(model, model.blocks[0]), *embedding_operators(model)):
        if op.kind == "memory":
            assert measured_as(op.name) in OPERATORS


def test_data_parallelism_adds_the_measured_exchange_of_gradients() -> None:
    """Two ranks with half of the batch each: half of the work, then one all-reduce of all
    gradients in fp32; the update is the same.
    """
    model, plan = small(), Plan.uniform(2)
    alone = predict(model, cluster(1), Workload(sequence_length=128, global_batch=4), plan)
    both = predict(
        model,
        cluster(2),
        Workload(sequence_length=128, global_batch=8),
        plan.with_(stages=Plan.uniform(2, dp=2).stages),
    )
    parameters = alone.time_s["optimizer"] / UPDATED_S
    assert both.time_s["compute"] == pytest.approx(alone.time_s["compute"])
    assert both.time_s["data_comm"] == pytest.approx(4.0 * parameters * SENT_S["all_reduce"])


def test_a_device_half_as_fast_takes_twice_as_long() -> None:
    work, plan = Workload(sequence_length=128, global_batch=4), Plan.uniform(2)
    fast, slow = (predict(small(), cluster(1, f), work, plan).step_time_s for f in (1.0, 2.0))
    assert slow == pytest.approx(2.0 * fast, rel=1e-6)
