"""Training programs that others run, in the words of `cost/software.py`.

A family of programs is a set of features at the time of its runs. What differs from run to run
(compiled or not, overlap switched off) is put on top by whoever reads the run.

What a feature is (which kernels are fused, what overlaps, what is kept) is from the programs'
sources and documents; its numbers are counted where they can be, and otherwise those that make
published runs of many models and plans come out (named below each family), found by a search that
`benchmarks/validate_halves.py` repeats on half of the runs and scores on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triptych.cost.software import TRIPTYCH, Footprint, Kernels, Software
from triptych.plan.plan import Plan
from triptych.units import GIB

MEGATRON_2021 = Software(
    name="Megatron-LM 2021",
    message_s=2e-4,
    accumulation_bytes=12.0,
    eager=Kernels(traffic=1.12, launches=2.0, host=1.0, loss_bytes=40.0),
    compiled=Kernels(traffic=1.12, launches=2.0, host=1.0, loss_bytes=40.0),
    attention="eager",
    flash=1,
    fuses_softmax=True,
    splits_messages=True,
    hides_gradients=False,
    checkpoint_s=1e-4,
    optimizer_bytes=40.0,
    is_fused=True,
    footprint=Footprint(context_bytes=2.0 * GIB, logit_bytes=10.0, owned_bytes=4.0, buckets=False),
)
"""Fused softmax, bias with GELU and dropout, messages scattered over tensor ranks (Narayanan et al.
2021, sec. 4); numbers from their tables 1 and 2, and Megatron-LM on V100 (DLPerf 2021)."""

MEGATRON_DEEPSPEED = Software(
    name="Megatron-DeepSpeed 2022",
    eager=Kernels(traffic=0.8, launches=2.4, host=1.9, loss_bytes=57.0),
    compiled=Kernels(traffic=0.8, launches=2.4, host=1.9, loss_bytes=57.0),
    attention="eager",
    flash=1,
    fuses_softmax=True,
    splits_messages=True,
    hides_gradients=False,
    exchange=0.8,
    scatter=0.2,
    checkpoint_s=4.1e-4,
    optimizer_bytes=36.0,
    two_sockets=1.28,
    message_s=1.4e-3,
    accumulation_bytes=8.4,
    is_fused=True,
    footprint=Footprint(
        context_bytes=2.5 * GIB,
        fragmentation=0.05,
        logit_bytes=10.0,
        owned_bytes=4.0,
        narrow_gradients=True,
        stage_outputs=1.0,
        more_in_flight=1,
    ),
    one_port=True,
    hides_shards=0.95,
)
"""As above under DeepSpeed: engine for pipelines that waits for messages, one more buffer a stage,
ZeRO-1 by a reduction per owner, ZeRO-3 by parameter over one port. Host time from the floor of
small models, 3.1 to 3.6 ms a layer (vTrain); exchanges and memory from BigScience on A100 and
V100."""

ONEFLOW = Software(
    name="OneFlow 2021",
    eager=Kernels(traffic=1.15, launches=2.0, host=0.2, loss_bytes=40.0),
    compiled=Kernels(traffic=1.15, launches=2.0, host=0.2, loss_bytes=40.0),
    attention="eager",
    flash=1,
    fuses_softmax=True,
    hides_messages=True,
    optimizer_bytes=40.0,
    is_fused=True,
    footprint=Footprint(
        context_bytes=1.2 * GIB,
        logit_bytes=2.0,
        stage_outputs=5.0,
        more_in_flight=2,
        buckets=False,
        sums_apart=True,
    ),
)
"""A static graph: hardly any host time, gradients and messages behind compute, buffers for each
message of a pipeline and each sum of gradients. Numbers from DLPerf 2021 on V100."""

ALPA = Software(
    name="Alpa (XLA) 2022",
    eager=Kernels(traffic=1.0, launches=2.0, host=0.2, loss_bytes=40.0),
    compiled=Kernels(traffic=1.0, launches=2.0, host=0.2, loss_bytes=40.0),
    attention="eager",
    flash=1,
    fuses_softmax=True,
    hides_gradients=False,
    optimizer_bytes=28.0,
    is_fused=True,
    keeps_softmax=True,
    keeps_activation=False,
    footprint=Footprint(logit_bytes=8.0, update_bytes=4.0, sums_apart=True, buckets=False),
    drops=False,
)
"""XLA, without dropout: activation fused into the products around it, sums of gradients beside
them, in fp32 for the update. Numbers from its tables on V100."""

COMPOSER = Software(
    name="composer FSDP 2023",
    eager=Kernels(traffic=1.25, launches=2.4, host=1.0, loss_bytes=43.0),
    compiled=Kernels(traffic=1.25, launches=2.4, host=1.0, loss_bytes=43.0),
    flash=1,
    hides_shards=0.4,
    is_fused=True,
    footprint=Footprint(context_bytes=1.0 * GIB, logit_bytes=4.0, buckets=False),
)
"""Eager PyTorch 2.0 with the first flash kernels. Numbers from MosaicML llm-foundry on A100 and
H100."""

TORCHTITAN = Software(
    name="torchtitan (FSDP2)",
    recompute="selective",
    selects_operators=True,
    eager=Kernels(traffic=2.0, launches=2.4, host=1.0, loss_bytes=48.0),
    compiled=Kernels(traffic=0.75, launches=1.0, host=1.0, loss_bytes=34.0),
    flash=2,
    hides_shards=0.53,
    footprint=Footprint(logit_bytes=14.0, split_logit_bytes=20.0, buckets=False),
    fp8_cast_bytes=6.0,
)
"""FSDP2, selective recomputation by operator, whole fp32 logits, whose softmax is kernel by kernel
where tensor ranks share them. Numbers from its H100 tables."""

MEGATRON_CORE = Software(
    name="Megatron Core",
    eager=Kernels(traffic=1.6, launches=2.0, host=0.7, loss_bytes=20.0),
    compiled=Kernels(traffic=1.6, launches=2.0, host=0.7, loss_bytes=20.0),
    flash=3,
    optimizer_bytes=44.0,
    accumulation_bytes=5.5,
    is_fused=True,
    gathers_entries=True,
    hides_entries=True,
    footprint=Footprint(context_bytes=1.0 * GIB, logit_bytes=6.0, buckets=False, stand_ins=True),
    zero=1,
)
"""Transformer Engine kernels, distributed optimizer, logits in fp32 too. Numbers from SimuMax's
runs on B200."""


def with_fused_loss(software: Software) -> Software:
    """The program with a loss that writes the gradient over its 16-bit logits."""
    return replace(software, footprint=replace(software.footprint, logit_bytes=2.0))


MEGATRON_BRIDGE = replace(
    with_fused_loss(MEGATRON_CORE),
    name="Megatron Bridge (NeMo)",
    eager=Kernels(traffic=1.1, launches=2.0, host=0.4, loss_bytes=16.0),
    compiled=Kernels(traffic=1.1, launches=2.0, host=0.4, loss_bytes=16.0),
    hides_tensor=0.5,
    hides_experts=0.35,
    fp8_cast_bytes=2.0,
)
"""With cast and transposition fused into other kernels, captured graphs, overlapped exchanges."""

INTERN_EVO = replace(
    MEGATRON_CORE,
    name="InternEvo 2023",
    eager=Kernels(traffic=1.3, launches=2.4, host=1.0, loss_bytes=30.0),
    compiled=Kernels(traffic=1.3, launches=2.4, host=1.0, loss_bytes=30.0),
    flash=2,
    footprint=Footprint(context_bytes=1.0 * GIB, logit_bytes=4.0, buckets=False),
)

DEEPSPEED = replace(
    MEGATRON_DEEPSPEED,
    name="DeepSpeed",
    eager=TRIPTYCH.eager,
    compiled=TRIPTYCH.compiled,
    attention="flash",
    flash=0,
    fuses_softmax=False,
    splits_messages=False,
    two_sockets=1.0,
    checkpoint_s=1e-4,
    is_fused=False,
)
"""The same engine under layers of `transformers`: its exchanges and memory, their kernels."""

BY_ENGINE: Mapping[str, Software] = {"Megatron-LM": MEGATRON_CORE, "DeepSpeed": DEEPSPEED}
"""What runs a plan that is read from a file of an engine."""


def as_run(plan: Plan, software: Software) -> Plan:
    """A plan in the words of the cost model: fused kernels count as compiled ones."""
    return plan.with_(compile=True) if software.is_fused else plan
