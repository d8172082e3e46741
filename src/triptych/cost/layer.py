"""One transformer layer on one rank: seconds, exposed communication, bytes kept."""

from __future__ import annotations

from triptych.cost.context import context_s
from triptych.cost.exchange import (
    HALVES,
    dispatch_s,
    entries,
    entries_s,
    halves_s,
    hidden_sums_s,
    norm_sum_s,
    regions,
)
from triptych.cost.operators import (
    Seconds,
    host_s,
    issued_operators,
    operator_seconds,
    with_host,
)
from triptych.cost.recompute import (
    kept_elements,
    regathers,
    repeated,
    repeated_halves,
    saved_elements,
)
from triptych.cost.setting import Parts, PieceCost, Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site
from triptych.model.model import Block


def layer_cost(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> PieceCost:
    """Cost of a layer for one micro-batch; `local` are its operators on the slowest rank."""
    seconds = [operator_seconds(site, op, setting) for op in local]
    forward = _pass(site, block, local, seconds, setting, is_forward=True)
    backward = _pass(site, block, local, seconds, setting, is_forward=False)
    again, flops = _recomputed(site, block, local, seconds, setting)
    bytes_per_element = site.tokens(setting) * site.rates.element_bytes
    working = _working_elements(site, local)
    if setting.recompute == "full":
        working += saved_elements(site, block, local, setting)
    return PieceCost(
        forward=forward,
        backward=backward.plus(again),
        recomputed_flops=flops,
        saved_bytes=kept_elements(site, block, local, setting) * bytes_per_element,
        working_bytes=working * bytes_per_element,
        weight_s=sum(s.weight_gradient_s for s in seconds),
        input_s=backward.total_s
        + again.total_s
        + hidden_sums_s(site, entries(site, block, local, setting), seconds, setting)
        - _saved_by_splitting_s(site, seconds, setting),
        deferred_bytes=_deferred_elements(local) * bytes_per_element,
    )


def _working_elements(site: Site, local: tuple[LocalOperator, ...]) -> float:
    """Elements per token that a backward has beside what was kept: gradients of two tensors.

    Fused kernels free what they read: of the widest product and of the hidden states.
    """
    widest = max(op.n for op in local if op.operator.kind == "gemm")
    return widest + (site.model.hidden if site.software.is_fused else widest)


def _saved_by_splitting_s(site: Site, seconds: list[Seconds], setting: Setting) -> float:
    """How much shorter than the whole backward its half I is.

    The work of W; less of it where the host, which issues everything in I, sets the pace.
    """
    _, issued_s = host_s(site, setting, len(seconds))
    whole_s, input_s = sum(s.backward_s for s in seconds), sum(s.input_gradient_s for s in seconds)
    return with_host(site.rates, whole_s, issued_s) - with_host(site.rates, input_s, issued_s)


def _deferred_elements(local: tuple[LocalOperator, ...]) -> float:
    """Elements per token that wait for W: each product's input and the gradient of its output."""
    products = [op for op in local if op.operator.kind == "gemm"]
    return float(sum((op.k + op.n) * op.operator.tokens_factor for op in products))


def _pass(
    site: Site,
    block: Block,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
    *,
    is_forward: bool,
) -> Parts:
    """Forward or backward of all operators, with what the ranks exchange in it."""
    work_s = sum(s.forward_s if is_forward else s.backward_s for s in seconds)
    issued_s = host_s(site, setting, issued_operators(site, local, setting))[0 if is_forward else 1]
    tensor_s = halves_s(site, setting, HALVES * regions(block)) + norm_sum_s(site, local, setting)
    if not is_forward:
        places = entries(site, block, local, setting)
        tensor_s += entries_s(site, places, seconds, setting)
        tensor_s -= hidden_sums_s(site, places, seconds, setting)
    parts = Parts(
        compute_s=work_s,
        tensor_s=tensor_s,
        context_s=context_s(site, local, seconds, setting, is_forward=is_forward),
        expert_s=dispatch_s(site, block, setting),
    )
    return _issued(site, parts, issued_s)


def _issued(site: Site, parts: Parts, host_seconds: float) -> Parts:
    """A pass as the host issues it: where the device waits for the host, that is compute time."""
    device_s = parts.total_s
    waits_s = with_host(site.rates, device_s, host_seconds) - device_s
    return parts._replace(compute_s=parts.compute_s + waits_s)


def _recomputed(
    site: Site,
    block: Block,
    local: tuple[LocalOperator, ...],
    seconds: list[Seconds],
    setting: Setting,
) -> tuple[Parts, float]:
    """What the backward runs again, and its FLOPs over all tensor and context ranks."""
    chosen = repeated(site, block, local, setting)
    if not chosen:
        return Parts(), 0.0
    issued_s, _ = host_s(site, setting, issued_operators(site, [local[i] for i in chosen], setting))
    if not site.rates.is_cpu:
        issued_s += site.software.checkpoint_s
    flops = sum(local[i].operator.forward_flops(site.sequence_length) for i in chosen)
    halves = repeated_halves(site, block, setting) + regathers(setting)
    parts = Parts(
        compute_s=sum(seconds[i].forward_s for i in chosen),
        tensor_s=halves_s(site, setting, halves),
        context_s=context_s(site, local, seconds, setting, is_forward=True),
        expert_s=dispatch_s(site, block, setting) if setting.recompute == "full" else 0.0,
    )
    return _issued(site, parts, issued_s), flops * setting.microbatch * site.sequence_length
