"""Published runs come out near what was measured, though nothing here is fitted to them.

Rows are of the published tables that they name: step times in seconds, memory in GB per GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict
from triptych.cost.prediction import Prediction
from triptych.cost.programs import MEGATRON_2021, MEGATRON_CORE, with_fused_loss
from triptych.model.model import Attention, Block, Mlp, Model
from triptych.plan.plan import Plan, Precision
from triptych.plan.workload import Workload

TIME_TOLERANCE, MEMORY_TOLERANCE = 0.25, 0.005


class Gpt(NamedTuple):
    """Narayanan et al. 2021, table 1: A100-80GB, sequences of 2048, full recomputation."""

    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    dp: int
    microbatch: int
    batch: int
    tflops: float  # per GPU, by their equation 3


GPTS = [
    Gpt(24, 2304, 24, 1, 1, 32, 16, 512, 137),
    Gpt(30, 3072, 32, 2, 1, 32, 16, 512, 138),
    Gpt(36, 4096, 32, 4, 1, 32, 16, 512, 142),
    Gpt(40, 6144, 48, 8, 1, 32, 8, 1024, 135),
    Gpt(48, 8192, 64, 8, 2, 32, 4, 1536, 138),
    Gpt(60, 10240, 80, 8, 4, 32, 2, 1792, 140),
    Gpt(80, 12288, 96, 8, 8, 24, 2, 2304, 148),
    Gpt(96, 16384, 128, 8, 16, 15, 1, 2160, 155),
    Gpt(105, 20480, 128, 8, 35, 9, 1, 2520, 163),
    Gpt(128, 25600, 160, 8, 64, 6, 1, 3072, 163),
]


def gpt(row: Gpt) -> Model:
    attention = Attention(
        query_heads=row.heads,
        kv_heads=row.heads,
        head_dim=row.hidden // row.heads,
        qkv_bias=True,
        out_bias=True,
        rotary=False,
    )
    mlp = Mlp(width=4 * row.hidden, gated=False, bias=True)
    block = Block(attention=attention, mlp=mlp, norm_bias=True)
    return Model(
        name="gpt",
        family="gpt2",
        hidden=row.hidden,
        blocks=(block,) * row.layers,
        vocab=51200,
        tied=True,
        max_position=2048,
        learned_positions=True,
        dropout=True,
    )


def measured_s(row: Gpt) -> float:
    """The step time behind the reported TFLOP/s: 96Bslh^2 (1 + s/6h + V/16lh) FLOPs."""
    h, s, layers, devices = row.hidden, 2048, row.layers, row.tp * row.pp * row.dp
    flops = 96 * row.batch * s * layers * h * h * (1 + s / (6 * h) + 51200 / (16 * layers * h))
    return flops / devices / row.tflops / 1e12


@pytest.mark.parametrize("row", GPTS, ids=lambda row: f"{row.hidden}")
def test_step_times_of_megatron_on_a100(row: Gpt) -> None:
    devices = row.tp * row.pp * row.dp
    plan = Plan.uniform(
        row.layers,
        tp=row.tp,
        pp=row.pp,
        dp=row.dp,
        microbatch=row.microbatch,
        recompute="full",
        attention="eager",
        compile=True,
        precision=Precision(parameter="fp16"),
    )
    prediction = predict(
        gpt(row),
        parse_cluster(f"{devices // 8}x8xA100-SXM4-80GB"),
        Workload(sequence_length=2048, global_batch=row.batch),
        plan,
        MEGATRON_2021,
    )
    assert prediction.step_time_s == pytest.approx(measured_s(row), rel=TIME_TOLERANCE)


class Llama(NamedTuple):
    """SimuMax's published runs: slices of Llama-3 on 8 x B200, ZeRO-1, TP with SP.

    Memory is that of tensors (torch's `max_memory_allocated`).
    """

    hidden: int
    layers: int
    tp: int
    pp: int
    dp: int
    batch: int
    step_s: float
    memory_gib: float


LLAMAS = [
    Llama(8192, 12, 1, 2, 4, 32, 1.4768, 66.55),
    Llama(8192, 12, 2, 1, 4, 32, 1.387, 60.68),
    Llama(8192, 12, 4, 1, 2, 16, 0.7656, 39.07),
    Llama(8192, 12, 8, 1, 1, 8, 0.5567, 28.29),
    Llama(16384, 4, 1, 2, 4, 128, 7.0464, 87.08),
    Llama(16384, 4, 2, 1, 4, 128, 6.6041, 81.59),
    Llama(16384, 4, 4, 1, 2, 64, 3.4554, 52.89),
    Llama(16384, 4, 8, 1, 1, 32, 1.9018, 38.57),
]


def sliced_llama(row: Llama) -> Prediction:
    is_large = row.hidden == 16384
    attention = Attention(
        query_heads=128 if is_large else 64, kv_heads=16 if is_large else 8, head_dim=128
    )
    block = Block(attention=attention, mlp=Mlp(width=53248 if is_large else 28672))
    model = Model(
        name="llama-slice",
        family="llama",
        hidden=row.hidden,
        blocks=(block,) * row.layers,
        vocab=128256,
        tied=False,
        max_position=8192,
    )
    settings: dict[str, Any] = {"tp": row.tp, "pp": row.pp, "dp": row.dp, "zero": 1}
    plan = Plan.uniform(
        row.layers,
        sequence_parallel=True,
        attention="flash",
        compile=True,
        precision=Precision.mixed(),
        **settings,
    )
    work = Workload(sequence_length=4096, global_batch=row.batch)
    fused = with_fused_loss(MEGATRON_CORE)
    return predict(model, parse_cluster("1x8xB200-SXM-180GB"), work, plan, fused)


@pytest.mark.parametrize("row", LLAMAS, ids=lambda row: f"{row.hidden}-tp{row.tp}")
def test_step_times_of_llama_slices_on_b200(row: Llama) -> None:
    assert sliced_llama(row).step_time_s == pytest.approx(row.step_s, rel=TIME_TOLERANCE)


@pytest.mark.parametrize("row", LLAMAS, ids=lambda row: f"{row.hidden}-tp{row.tp}")
def test_memory_of_llama_slices_on_b200(row: Llama) -> None:
    """Weights, fp32 gradients, ZeRO's share, activations, 16-bit logits, one tensor a shape."""
    memory = sliced_llama(row).memory_gib
    tensors = sum(memory.values()) - memory["overhead"]
    assert tensors == pytest.approx(row.memory_gib, rel=MEMORY_TOLERANCE)
