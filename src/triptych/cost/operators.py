"""Seconds of one operator on one rank: products, attention, memory-bound work.

The software's share shows in two places only: unfused element-wise kernels move more bytes
(`EAGER_TRAFFIC`), and the host needs time for each kernel (`host_s`).
"""

from __future__ import annotations

from typing import NamedTuple

from triptych.cost.gemm import gemm_s
from triptych.cost.rates import Rates
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator

EAGER_TRAFFIC = 3.0
"""Bytes that eager PyTorch moves for norms, rotary, activations over what a fused kernel moves
(counted kernel by kernel for a Llama layer of `transformers`: 308h against 94h)."""

MEMORY_BACKWARD = 1.5
"""Backward over forward traffic of memory-bound operators: one more tensor is read."""

FLASH_BACKWARD = 2.5
"""Backward over forward FLOPs of flash attention: scores are computed again (5 products, not 2)."""

SCORE_BYTES = (8.0, 14.0)
"""Bytes moved per element of a materialised score matrix, forward and backward (16 bit)."""

LAUNCHES_PER_OPERATOR = 2.4
"""Kernels per operator of the model in eager mode: ~26 for a Llama layer, fused 1 each."""

HOST_BACKWARD = 1.6
"""Host time of the backward over the forward's."""


class Seconds(NamedTuple):
    """Forward and backward seconds; the backward in its two halves where it has two."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Both halves."""
        return self.input_gradient_s + self.weight_gradient_s


def operator_seconds(
    local: LocalOperator, rates: Rates, setting: Setting, sequence_length: int
) -> Seconds:
    """Seconds of an operator for one micro-batch on one rank."""
    tokens = setting.microbatch * sequence_length / setting.context
    kind = local.operator.kind
    if kind == "gemm":
        return _gemm(local, rates, setting, tokens)
    if kind == "attention":
        if setting.attention == "eager" or local.operator.is_written_out:
            return _unfused_attention(local, rates, tokens, sequence_length)
        return _flash_attention(local, rates, tokens, sequence_length)
    return _memory(local, rates, setting, tokens)


def host_s(rates: Rates, setting: Setting, count: int) -> tuple[float, float]:
    """Seconds that the host needs to issue `count` operators, forward and backward."""
    launches = count * (1.0 if setting.compile else LAUNCHES_PER_OPERATOR)
    return launches * rates.operator_s, launches * rates.operator_s * HOST_BACKWARD


def with_host(rates: Rates, work_s: float, host_seconds: float) -> float:
    """Work and its issuing together: side by side on a GPU, one after the other on a CPU."""
    return work_s + host_seconds if rates.is_cpu else max(work_s, host_seconds)


def _gemm(local: LocalOperator, rates: Rates, setting: Setting, tokens: float) -> Seconds:
    """Three products: xW, dy W^T, x^T dy. Experts: one each, tokens spread evenly."""
    op = local.operator
    rows = tokens
    if op.copies > 1:
        rows = tokens * op.tokens_factor * setting.expert / op.copies
    k, n, copies = local.k, local.n, local.copies
    return Seconds(
        gemm_s(rates, rows, k, n, copies),
        gemm_s(rates, rows, n, k, copies),
        gemm_s(rates, k, rows, n, copies),
    )


def _flash_attention(
    local: LocalOperator, rates: Rates, tokens: float, sequence_length: int
) -> Seconds:
    op = local.operator
    context = op.average_context(sequence_length)
    flops = 2.0 * local.query_heads * (op.head_dim + op.value_dim) * context * tokens
    forward_s = flops / rates.attention_flops
    return Seconds(forward_s, FLASH_BACKWARD * forward_s)


def _unfused_attention(
    local: LocalOperator, rates: Rates, tokens: float, sequence_length: int
) -> Seconds:
    """Scores as a matrix: whole products (no triangle), softmax between them."""
    op = local.operator
    scores = local.query_heads * tokens * sequence_length
    heads = local.query_heads * tokens / sequence_length  # matrices of s x s
    products_s = gemm_s(rates, sequence_length, op.head_dim, sequence_length, heads)
    products_s += gemm_s(rates, sequence_length, sequence_length, op.value_dim, heads)
    forward_bytes, backward_bytes = (size * rates.element_bytes / 2.0 for size in SCORE_BYTES)
    return Seconds(
        products_s + scores * forward_bytes / rates.memory_bytes_per_s,
        2.0 * products_s + scores * backward_bytes / rates.memory_bytes_per_s,
    )


def _memory(local: LocalOperator, rates: Rates, setting: Setting, tokens: float) -> Seconds:
    elements = local.elements + local.sequence_elements / setting.sequence_split
    traffic = 1.0 if setting.compile else EAGER_TRAFFIC
    moved_bytes = elements * tokens * rates.element_bytes * traffic
    forward_s = moved_bytes / rates.memory_bytes_per_s
    return Seconds(forward_s, MEMORY_BACKWARD * forward_s)
