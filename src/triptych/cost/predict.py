"""A plan, a model, a cluster and a workload in; what it will cost out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from triptych.cluster.cluster import Cluster
from triptych.cost.assumptions import assumptions
from triptych.cost.frame import Frame
from triptych.cost.memory import Memory, overhead_bytes
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Parts
from triptych.cost.software import TRIPTYCH, Software
from triptych.cost.step import (
    Priced,
    Step,
    busy_s,
    is_exact,
    predicted_timeline,
    price_step,
)
from triptych.cost.storage import Storage
from triptych.cost.traffic import frame_traffic
from triptych.cost.uncertainty import MEMORY_SPARE, half_width
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable
from triptych.plan.workload import Workload
from triptych.units import GIB


def predict(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    plan: Plan,
    software: Software = TRIPTYCH,
) -> Prediction:
    """Time, memory and traffic of one training step of a legal plan under a training program."""
    return predict_with(Pricer(model, cluster, workload, software), plan)


class Estimate(NamedTuple):
    """The heart of a prediction: a step, its terms and error bar, and the largest rank's memory.

    `overhead_bytes` are the allocator's and the context's part of the memory's overhead.
    """

    step: Step
    time_s: Mapping[str, float]
    half_width: float
    memory: Memory
    limit_bytes: float  # of that rank's device
    overhead_bytes: tuple[float, float]


def estimate(frame: Frame, storage: Storage, priced: Priced, schedule: str) -> Estimate:
    """Simulates a step and finds the largest rank."""
    step = price_step(frame, priced, schedule)
    fullest = frame.fullest_rank(storage, schedule)
    memory = frame.memory(fullest, storage, schedule)
    time_s = _time_terms(frame, storage, step)
    has_experts = frame.pricer.model.experts is not None
    tensors = memory.total_bytes - memory.overhead
    return Estimate(
        step=step,
        time_s=time_s,
        half_width=half_width(
            time_s, frame.settings[0].dtype, has_experts=has_experts, is_cpu=frame.is_cpu
        ),
        memory=memory,
        limit_bytes=frame.pricers[fullest].memory_limit_bytes,
        overhead_bytes=overhead_bytes(tensors, frame.footprint, frame.is_cpu),
    )


def estimate_of(pricer: Pricer, plan: Plan) -> Estimate:
    """The estimate of a plan."""
    frame, storage = Frame.of(pricer, plan), Storage.of(plan)
    return estimate(frame, storage, Priced.of(frame, storage), plan.schedule)


def predict_with(pricer: Pricer, plan: Plan, *, with_timeline: bool = True) -> Prediction:
    """As `predict`, with pieces that may have been priced before, and without spans if unwanted."""
    frame = Frame.of(pricer, plan)
    storage = Storage.of(plan)
    priced = Priced.of(frame, storage)
    found = estimate(frame, storage, priced, plan.schedule)
    step, memory, limit = found.step, found.memory, found.limit_bytes
    rates = pricer.rates(plan.precision.parameter)
    flops = pricer.model_flops
    per_device = flops / plan.world_size / step.total_s
    peak_flops = mean_peak_flops(frame)
    reasons = tuple(unrunnable(plan, pricer.model))
    is_whole = is_exact(frame, plan.schedule)
    return Prediction(
        step_time_s=step.total_s,
        step_time_low_s=step.total_s * math.exp(-found.half_width),
        step_time_high_s=step.total_s * math.exp(found.half_width),
        tokens_per_s_per_gpu=pricer.workload.tokens / plan.world_size / step.total_s,
        model_tflops_per_gpu=per_device / 1e12,
        mfu=per_device / peak_flops,
        hfu=per_device / peak_flops * (1 + recomputed_flops(frame) / flops),
        peak_memory_gib=memory.total_bytes / GIB,
        memory_gib=_memory_gib(memory),
        overhead_gib=_overhead_gib(found),
        time_s=found.time_s,
        bubble_fraction=_bubble_fraction(frame, priced, step, plan.schedule),
        bytes_sent_per_rank=frame_traffic(frame, storage, plan.schedule)._asdict(),
        fits=memory.total_bytes <= limit,
        memory_spare=limit / memory.total_bytes - 1,
        peak_memory_high_gib=memory.total_bytes * (1 + MEMORY_SPARE) / GIB,
        memory_limit_gib=limit / GIB,
        runnable=not reasons,
        reasons=reasons,
        assumptions=assumptions(
            plan,
            pricer.model,
            pricer.cluster,
            rates,
            pricer.software,
            is_whole,
            pricer.workload.optimizer,
        ),
        plan=plan,
        timeline=predicted_timeline(frame, priced, plan.schedule) if with_timeline else None,
    )


def mean_peak_flops(frame: Frame) -> float:
    """The sheet peak of a device, averaged over those of the plan."""
    ranks = list(zip(frame.stages, frame.pricers, frame.settings, strict=True))[: frame.num_ranks]
    peaks = sum(s.num_devices * own.rates(setting.dtype).peak_flops for s, own, setting in ranks)
    return peaks / sum(stage.num_devices for stage, _, _ in ranks)


def recomputed_flops(frame: Frame) -> float:
    """FLOPs of a step that backwards repeat, over all ranks."""
    return frame.num_microbatches * sum(
        cost.recomputed_flops * stage.data
        for cost, stage in zip(frame.costs, frame.stages, strict=True)
    )


def _memory_gib(memory: Memory) -> Mapping[str, float]:
    return {term: size / GIB for term, size in memory._asdict().items()}


def _overhead_gib(found: Estimate) -> Mapping[str, float]:
    allocator, context = found.overhead_bytes
    return {"allocator": allocator / GIB, "context": context / GIB}


# --- time by term ------------------------------------------------------------------------------


def _rank_parts(frame: Frame, storage: Storage, rank: int) -> Parts:
    """Seconds of a pipeline rank's micro-batches by term."""
    parts = Parts()
    for stage in frame.stages_of(rank):
        forward_s, backward_s = frame.sharded(storage, stage)
        cost = frame.costs[stage]
        parts = parts.plus(cost.forward).plus(cost.backward)
        parts = parts.plus(Parts(data_s=forward_s + backward_s))
    return parts.times(frame.num_microbatches)


def _time_terms(frame: Frame, storage: Storage, step: Step) -> Mapping[str, float]:
    """Where the busiest pipeline rank's step goes. Waiting that is not for messages is bubble."""
    busiest = max(
        (_rank_parts(frame, storage, rank) for rank in frame.distinct),
        key=lambda parts: parts.total_s,
    )
    bubble_s = 0.0
    if frame.num_ranks > 1:
        bubble_s = step.makespan_s - step.pipeline_s - busiest.total_s
    return {
        "compute": busiest.compute_s,
        "tensor_comm": busiest.tensor_s,
        "pipeline_comm": step.pipeline_s,
        "data_comm": busiest.data_s + step.synchronise_s + step.gather_s,
        "context_comm": busiest.context_s,
        "expert_comm": busiest.expert_s,
        "bubble": max(0.0, bubble_s),
        "optimizer": step.optimizer_s,
    }


def _bubble_fraction(frame: Frame, priced: Priced, step: Step, schedule: str) -> float:
    """Idle share of all pipeline ranks between first and last compute, as `Timeline` has it."""
    if frame.num_ranks == 1:
        return 0.0
    return 1.0 - busy_s(frame, priced, schedule) / (frame.num_ranks * step.makespan_s)
