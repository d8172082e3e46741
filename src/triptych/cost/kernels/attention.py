"""Seconds of attention on one rank: fused (flash) kernels, or scores written out as matrices."""

from __future__ import annotations

from triptych.cost.kernels.gemm import KERNEL_S, gemm_s
from triptych.cost.kernels.rates import Rates

FLASH_BACKWARD = 2.5
"""Backward over forward FLOPs of flash attention: scores are computed again (5 products, not 2)."""

FLASH_BACKWARD_RATE = 0.8
"""Rate of the backward kernel against the forward's (0.75-0.82 on A100, H100 and B200)."""

FLASH_RAMP = 700.0
"""Tokens of context at which a kernel of the first two generations reaches half of its rate."""

FLASH_ROWS = 128
"""Queries of a head that a multiprocessor works off in one tile."""

FLASH_TAIL = 1.0
"""Tiles that a multiprocessor waits for at a kernel's end: under a triangle they are unequal
(aiconfigurator's tables of context attention: 0.6 on A100, 1.0 on H100, 1.8 on B200)."""

SOFTMAX_BYTES = (4.0, 6.0)
"""Bytes per 16-bit score that one fused kernel for mask and softmax moves, forward and backward."""

PLAIN_SOFTMAX_BYTES = (24.0, 16.0)
"""The same kernel by kernel in fp32: scale, mask, convert, softmax, convert."""

DROPOUT_BYTES = (5.0, 5.0)
"""Bytes per score of dropout: read, write and a byte of mask."""


def flash_s(
    rates: Rates, generation: int, *, heads: float, width: float, context: float, tokens: float
) -> tuple[float, float]:
    """Forward and backward seconds. `width` is key plus value size of a head, `context` the mean
    number of tokens that a query sees (half of a causal sequence).
    """
    flops = 2.0 * heads * width * context * tokens
    if rates.kernels:
        forward, backward = rates.kernels.attention
        place = (2.0 * context, width / 2.0)
        return flops / forward.at(*place), flops / backward.at(*place)
    attained = rates.flash_flops[generation - 1]
    if rates.multiprocessors:
        attained *= 2.0 * context / (2.0 * context + FLASH_RAMP)
        tiles = heads * tokens / FLASH_ROWS / rates.multiprocessors
        attained *= tiles / (tiles + FLASH_TAIL)
    forward_s = flops / attained
    backward_s = forward_s * FLASH_BACKWARD
    if rates.is_cpu:
        return forward_s, backward_s
    return forward_s + KERNEL_S, backward_s / FLASH_BACKWARD_RATE + KERNEL_S


def unfused_s(
    rates: Rates,
    *,
    matrices: float,
    rows: float,
    length: float,
    key: float,
    value: float,
    softmax_is_fused: bool,
    has_dropout: bool,
) -> tuple[float, float]:
    """Forward and backward seconds of `matrices` score matrices of `rows` x `length`.

    Products are whole (no triangle). Where a head's size is no multiple of 8, tensor cores cannot
    do them.
    """
    products_s = _product_s(rates, rows, key, length, matrices)
    products_s += _product_s(rates, rows, length, value, matrices)
    softmax = SOFTMAX_BYTES if softmax_is_fused else PLAIN_SOFTMAX_BYTES
    scores = matrices * rows * length * rates.element_bytes / 2.0 / rates.memory_bytes_per_s
    forward, backward = (
        scores * (moved + (dropped if has_dropout else 0.0))
        for moved, dropped in zip(softmax, DROPOUT_BYTES, strict=True)
    )
    return products_s + forward, 2.0 * products_s + backward


def _product_s(rates: Rates, m: float, k: float, n: float, copies: float) -> float:
    is_aligned = rates.element_bytes > 2 or (k % 8 == 0 and n % 8 == 0)
    if is_aligned or not rates.multiprocessors:
        return gemm_s(rates, m, k, n, copies)
    return 2.0 * m * k * n * copies / rates.plain_flops
