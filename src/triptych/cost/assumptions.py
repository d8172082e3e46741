"""What each term of a prediction takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.rates import Rates
from triptych.cost.software import Software
from triptych.model.model import Model
from triptych.plan.matrices import MUON
from triptych.plan.plan import Plan
from triptych.plan.transfer import has_one_spread
from triptych.schedule.traits import TRAITS


def assumptions(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    rates: Rates,
    software: Software,
    simulated: bool,
    optimizer: str = "adamw",
) -> Mapping[str, tuple[str, ...]]:
    """Texts by term of the prediction; only those that bear on this plan."""
    terms = {
        "compute": tuple(_compute(plan, rates, cluster, software, optimizer)),
        "communication": tuple(_communication(plan, rates, cluster, software)),
        "bubble": tuple(_bubble(plan, simulated)),
        "memory": tuple(_memory(plan, rates, software)),
        "model": model.unreliable,
    }
    return {term: texts for term, texts in terms.items() if texts}


def _compute(
    plan: Plan, rates: Rates, cluster: Cluster, software: Software, optimizer: str
) -> Iterator[str]:
    device = cluster.device
    yield (
        f"products that last attain {device.gemm_efficiency:.0%} of {rates.peak_flops / 1e12:.4g} "
        f"TFLOP/s ({rates.dtype}), memory-bound operators {device.memory_efficiency:.0%} of "
        f"{device.memory_bytes_per_s / 1e9:.4g} GB/s"
    )
    if rates.stand_in:
        yield f"no {rates.dtype} peak is known: the {rates.stand_in} peak stands in"
    if not plan.compile:
        traffic = software.eager.traffic
        yield f"eager element-wise kernels move {traffic:g} x the bytes of fused ones"
    if len(cluster.groups) > 1:
        yield "a stage runs at the pace of the slowest of its own devices"
    if optimizer == MUON:
        yield "Muon's products run as large ones do; every rank has its share of the matrices"
    if plan.offload != "none":
        yield f"offload={plan.offload}: the time of moving is not counted"


def _communication(plan: Plan, rates: Rates, cluster: Cluster, software: Software) -> Iterator[str]:
    if plan.world_size == 1:
        return
    if rates.is_cpu:
        yield "communication hides behind compute only where it waits for a slow network"
    else:
        shares = [group.link.efficiency for group in cluster.groups]
        yield (
            f"links attain {min(shares):.0%} of the sheet in a node, "
            f"{cluster.network.efficiency:.0%} between nodes"
        )
    if any(stage.data * stage.context > 1 for stage in plan.stages) and plan.zero < 2:
        yield "gradients reduce behind the last micro-batch's backward; the last bucket is exposed"
    if plan.zero >= 2:
        hidden = software.hides_shards
        yield f"ZeRO-{plan.zero} traffic hides behind compute, at most {hidden:.0%} of it"
    if any(stage.expert > 1 for stage in plan.stages):
        yield "tokens spread evenly over experts"


def _bubble(plan: Plan, simulated: bool) -> Iterator[str]:
    if plan.pp == 1:
        return
    yield "messages travel while ranks compute; their latency is in pipeline_comm"
    if not has_one_spread(plan):
        yield "between stages with other degrees each slice travels once and is gathered there"
    if TRAITS[plan.schedule].splits_backward:
        is_late = TRAITS[plan.schedule].validates_late
        meeting = "at the end of the step" if is_late else "before the optimizer (gradient norm)"
        yield f"all ranks meet {meeting}: their skew counts as bubble"
        if is_late:
            yield "between steps without clipping the next step's forwards fill that skew"
    if plan.schedule == "dualpipe-v":
        yield "a forward and a backward run one after the other, not at the same time"
    if not simulated:
        yield "simulated with fewer micro-batches and continued at the steady pace"


def _memory(plan: Plan, rates: Rates, software: Software) -> Iterator[str]:
    if rates.is_cpu:
        yield "overhead is an interpreter with torch and transformers loaded"
    else:
        lost = software.footprint.fragmentation
        yield f"overhead is context and communicators, and {lost:.0%} fragmentation"
    if plan.attention != "eager":
        yield "attention keeps no score matrix"
