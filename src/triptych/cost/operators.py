"""Seconds of one operator on one rank, and of the host that issues operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.cost.kernels.attention import flash_s, unfused_s
from triptych.cost.kernels.gemm import KERNEL_S, gemm_s, joined_s
from triptych.cost.kernels.rates import Rates
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator
from triptych.cost.site import Site

MEMORY_BACKWARD = 1.55
"""Backward over forward traffic of memory-bound operators: one more tensor is read."""

NORM_RATE = 0.69
"""Rate of a norm against that of an addition (vidur's A100 and H100 tables: 105 and 55 us for a
row read and written, and one more read)."""

GENERATIONS = {"sdpa": 2, "flash": 3}
"""Attention kernels by a plan's `attention`: torch's own, and the flash-attention library's."""

SOFTMAX_ROWS = 4
"""Score matrices of a rank that the fused softmax of Megatron-LM wants a multiple of."""


SOFTMAX_OPERATORS = 3.0
"""Operators more than one if mask, scale and softmax are kernels of their own."""

ROUTED = frozenset({"dispatch", "combine"})
"""Operators whose rows are sorted once more where experts are spread: by sender and by expert."""

EXPERT_OPERATORS = 3.0
"""Operators of one expert where experts run one after the other."""

SOCKET_DEVICES = 4
"""Devices of a node at one of its two sockets."""


class Seconds(NamedTuple):
    """Forward and backward seconds; the backward in its two halves where it has two."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Both halves."""
        return self.input_gradient_s + self.weight_gradient_s


def operator_seconds(site: Site, local: LocalOperator, setting: Setting) -> Seconds:
    """Seconds of an operator for one micro-batch on one rank."""
    kind = local.operator.kind
    if kind == "gemm":
        return _gemm(site, local, setting)
    if kind == "attention":
        return _attention(site, local, setting)
    return _memory(site, local, setting)


def host_s(site: Site, setting: Setting, count: float) -> tuple[float, float]:
    """Seconds that the host needs to issue `count` operators, forward and backward."""
    kernels = site.software.kernels(setting.compile)
    seconds = count * kernels.launches * kernels.host * site.rates.operator_s
    if setting.tensor > SOCKET_DEVICES:
        seconds *= site.software.two_sockets
    return seconds, seconds * site.rates.host_backward


def issued_operators(site: Site, local: Sequence[LocalOperator], setting: Setting) -> float:
    """Operators that the host issues for a layer; a softmax that is not fused is several."""
    count = float(len(local))
    for op in local:
        if op.operator.kind == "attention" and _is_unfused(op, setting):
            fused = _softmax_is_fused(site, op, setting)
            count += 0.0 if fused else SOFTMAX_OPERATORS
    experts = max((op.copies for op in local), default=1)
    if site.rates.is_cpu:  # has no grouped kernels: each expert's up, activation and down
        count += EXPERT_OPERATORS * (experts - 1)
    return count


def with_host(rates: Rates, work_s: float, host_seconds: float) -> float:
    """Work and its issuing together: side by side on a GPU, one after the other on a CPU."""
    return work_s + host_seconds if rates.is_cpu else joined_s(work_s, host_seconds)


def _gemm(site: Site, local: LocalOperator, setting: Setting) -> Seconds:
    """Three products: xW, dy W^T, x^T dy. Experts: one each, tokens spread evenly."""
    op, rates = local.operator, site.rates
    rows = site.tokens(setting)
    if op.copies > 1:
        rows = rows * op.tokens_factor * setting.expert / op.copies
    k, n, copies = local.k, local.n, local.copies
    seconds = Seconds(
        gemm_s(rates, rows, k, n, copies),
        gemm_s(rates, rows, n, k, copies),
        gemm_s(rates, k, rows, n, copies),
    )
    if rates.dtype != "fp8":
        return seconds
    cast_s = site.software.fp8_cast_bytes * copies / rates.memory_bytes_per_s
    return Seconds(
        seconds.forward_s + (rows * k + k * n) * cast_s,
        seconds.input_gradient_s + rows * n * cast_s,
        seconds.weight_gradient_s,
    )


def _attention(site: Site, local: LocalOperator, setting: Setting) -> Seconds:
    op, software = local.operator, site.software
    length = site.sequence_length
    if not _is_unfused(local, setting):
        pair = flash_s(
            site.rates,
            software.flash or GENERATIONS[setting.attention],
            heads=local.query_heads,
            width=op.head_dim + op.value_dim,
            context=op.average_context(length),
            tokens=site.tokens(setting),
        )
        return Seconds(*pair)
    pair = unfused_s(
        site.rates,
        matrices=local.query_heads * setting.microbatch,
        rows=length / setting.context,
        length=length,
        key=op.head_dim,
        value=op.value_dim,
        softmax_is_fused=_softmax_is_fused(site, local, setting),
        has_dropout=op.dropout,
    )
    return Seconds(*pair)


def _is_unfused(local: LocalOperator, setting: Setting) -> bool:
    return setting.attention == "eager" or local.operator.is_written_out


def _softmax_is_fused(site: Site, local: LocalOperator, setting: Setting) -> bool:
    matrices = local.query_heads * setting.microbatch
    return site.software.fuses_softmax and matrices % SOFTMAX_ROWS == 0


def measured_as(name: str) -> str:
    """The kind of measured operator that a memory-bound one is like."""
    if name.endswith("_norm") or name.startswith("qk_norm"):
        return "norm"
    kinds = {"temperature": "rotary", "dispatch": "rows", "combine": "rows"}
    kinds |= {name: name for name in ("rotary", "embedding")}
    return "activation" if name.endswith("_activation") else kinds.get(name, "residual")


def _memory(site: Site, local: LocalOperator, setting: Setting) -> Seconds:
    rates = site.rates
    elements = local.elements + local.sequence_elements / setting.sequence_split
    if rates.kernels:
        elements += _sorted_elements(local, setting)
        pair = rates.kernels.operators[measured_as(local.operator.name)]
        return Seconds(*(curve.above_least(elements * site.tokens(setting)) for curve in pair))
    traffic = site.software.kernels(setting.compile).traffic
    if local.operator.name.endswith("_norm") and not rates.is_cpu:
        traffic /= NORM_RATE
    elements = elements * traffic + _sorted_elements(local, setting)
    moved_bytes = elements * site.tokens(setting) * rates.element_bytes
    forward_s = moved_bytes / rates.memory_bytes_per_s
    start_s = 0.0 if rates.is_cpu else KERNEL_S
    return Seconds(forward_s + start_s, MEMORY_BACKWARD * forward_s + start_s)


def _sorted_elements(local: LocalOperator, setting: Setting) -> float:
    """Elements per token that one more sort of routed rows reads and writes, a copy each."""
    if setting.expert == 1 or local.operator.name not in ROUTED:
        return 0.0
    return 2.0 * local.sequence_saved / setting.sequence_split
