"""One transformer layer on one rank: seconds, exposed communication, bytes kept."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cost.collectives import Group
from triptych.cost.operators import Seconds, host_s, operator_seconds, with_host
from triptych.cost.rates import Rates
from triptych.cost.setting import Parts, PieceCost, Setting
from triptych.cost.shard import LocalOperator
from triptych.model.model import Block, Experts, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where and for what a piece is priced."""

    model: Model
    sequence_length: int
    rates: Rates
    tensor: Group
    context: Group
    expert: Group


def layer_cost(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> PieceCost:
    """Cost of a layer for one micro-batch; `local` are its operators on the slowest rank."""
    seconds = [operator_seconds(op, site.rates, setting, site.sequence_length) for op in local]
    forward = _forward(site, block, local, seconds, setting)
    backward = _backward(site, block, local, seconds, setting)
    again, flops = _recomputed(site, block, local, seconds, setting, forward)
    tokens = setting.microbatch * site.sequence_length / setting.context
    saved = _saved_elements(site, local, setting)
    kept = _kept_elements(site, local, setting, saved)
    widest = max(op.n for op in local if op.operator.kind == "gemm")
    working = 2.0 * widest + (saved if setting.recompute == "full" else 0.0)
    return PieceCost(
        forward=forward,
        backward=backward.plus(again),
        recomputed_flops=flops,
        saved_bytes=kept * tokens * site.rates.element_bytes,
        working_bytes=working * tokens * site.rates.element_bytes,
    )


def activation_bytes(site: Site, setting: Setting) -> float:
    """Bytes of the hidden states [b, s, h] of a micro-batch, not divided by sequence parallelism."""
    tokens = setting.microbatch * site.sequence_length / setting.context
    return tokens * site.model.hidden * site.rates.element_bytes


def message_bytes(site: Site, setting: Setting) -> float:
    """Bytes of the hidden states that one rank hands to the next stage."""
    return activation_bytes(site, setting) / setting.sequence_split


def _forward(
    site: Site,
    block: Block,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
) -> Parts:
    issued_s, _ = host_s(site.rates, setting, len(local))
    work_s = sum(piece.forward_s for piece in seconds)
    return Parts(
        compute_s=with_host(site.rates, work_s, issued_s),
        tensor_s=_regions_s(site, block, setting),
        context_s=_ring_s(site, local, seconds, setting, rounds=1),
        expert_s=_dispatch_s(site, block, setting),
    )


def _backward(
    site: Site,
    block: Block,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
) -> Parts:
    _, issued_s = host_s(site.rates, setting, len(local))
    work_s = sum(piece.backward_s for piece in seconds)
    return Parts(
        compute_s=with_host(site.rates, work_s, issued_s),
        tensor_s=_regions_s(site, block, setting),
        context_s=_ring_s(site, local, seconds, setting, rounds=2),
        expert_s=_dispatch_s(site, block, setting),
    )


def _recomputed(
    site: Site,
    block: Block,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
    forward: Parts,
) -> tuple[Parts, float]:
    """What the backward runs again, and its FLOPs over all tensor and context ranks."""
    tokens = setting.microbatch * site.sequence_length
    if setting.recompute == "full":
        flops = sum(op.operator.forward_flops(site.sequence_length) for op in local)
        return forward, flops * tokens
    if setting.recompute == "selective":
        chosen = [i for i, op in enumerate(local) if op.operator.kind == "attention"]
        flops = sum(local[i].operator.forward_flops(site.sequence_length) for i in chosen)
        return Parts(compute_s=sum(seconds[i].forward_s for i in chosen)), flops * tokens
    return Parts(), 0.0


# --- communication -----------------------------------------------------------------------------


def regions(block: Block) -> int:
    """Tensor-parallel regions of a layer: attention and MLP, or both in one (a single norm)."""
    return 2 if block.norms >= 2 else 1


def _regions_s(site: Site, block: Block, setting: Setting) -> float:
    """An all-reduce per region, or with sequence parallelism an all-gather and a reduce-scatter."""
    if setting.tensor == 1:
        return 0.0
    size_bytes = activation_bytes(site, setting)
    if setting.sequence_parallel:
        return regions(block) * 2 * site.tensor.gather_s(size_bytes)
    return regions(block) * site.tensor.all_reduce_s(size_bytes)


def ring_bytes(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Bytes of the keys and values that a rank passes on in one round of ring attention."""
    tokens = setting.microbatch * site.sequence_length / setting.context
    widths = (
        op.kv_heads * (op.operator.head_dim + op.operator.value_dim)
        for op in local
        if op.operator.kind == "attention"
    )
    return sum(widths) * tokens * site.rates.element_bytes


def _ring_s(
    site: Site,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
    rounds: int,
) -> float:
    """Ring attention's exposed seconds: what does not hide behind the attention of a chunk."""
    if setting.context == 1:
        return 0.0
    hops = rounds * (setting.context - 1)
    sent_s = hops * site.context.send_s(ring_bytes(site, local, setting))
    attention_s = sum(
        piece.forward_s if rounds == 1 else piece.backward_s
        for op, piece in zip(local, seconds, strict=True)
        if op.operator.kind == "attention"
    )
    hidden_s = 0.0 if site.rates.is_cpu else attention_s * (1 - 1 / setting.context)
    return max(0.0, sent_s - hidden_s)


def dispatch_bytes(site: Site, block: Block, setting: Setting) -> float:
    """Bytes of the tokens that a rank hands to the experts of other ranks, and gets back."""
    if not isinstance(block.mlp, Experts):
        return 0.0
    return activation_bytes(site, setting) * block.mlp.top_k


def _dispatch_s(site: Site, block: Block, setting: Setting) -> float:
    """Dispatch and combine: two all-to-alls a pass."""
    size_bytes = dispatch_bytes(site, block, setting)
    return 2 * site.expert.all_to_all_s(size_bytes) if size_bytes else 0.0


# --- memory ------------------------------------------------------------------------------------


def _saved_elements(site: Site, local: tuple[LocalOperator, ...], setting: Setting) -> float:
    """Elements per token that a layer keeps if nothing is recomputed."""
    split = setting.sequence_split
    saved = sum(op.saved + op.sequence_saved / split for op in local)
    if setting.attention == "eager":
        saved += sum(
            op.query_heads * site.sequence_length for op in local if op.operator.kind == "attention"
        )
    return saved + (0.0 if setting.compile else _unfused_elements(local, setting, site.rates))


def _unfused_elements(local: tuple[LocalOperator, ...], setting: Setting, rates: Rates) -> float:
    """What eager kernels keep on top.

    A norm keeps its normalised input, and a fp32 copy instead of a 16-bit input; SwiGLU keeps the
    activated gate.
    """
    extra = 0.0
    norm_extra = 1.0 + max(0.0, 4.0 / rates.element_bytes - 1.0)
    for op in local:
        name = op.operator.name
        if name.endswith("_norm") and op.operator.split == "sequence":
            extra += norm_extra * op.sequence_elements / 2.0 / setting.sequence_split
        elif name.endswith("_activation") and op.elements > 2.0 * op.saved:
            extra += op.saved
    return extra


def _kept_elements(
    site: Site, local: tuple[LocalOperator, ...], setting: Setting, saved: float
) -> float:
    """Elements per token kept until the backward, after recomputation."""
    if setting.recompute == "full":
        return site.model.hidden / setting.sequence_split
    if setting.recompute == "selective":
        return saved - sum(
            op.query_heads * (op.operator.value_dim + 2)
            + (op.query_heads * site.sequence_length if setting.attention == "eager" else 0)
            for op in local
            if op.operator.kind == "attention"
        )
    return saved
