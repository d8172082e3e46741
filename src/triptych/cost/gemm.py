"""Seconds of matrix products: attained peak, less for short inner dimensions and few tiles."""

from __future__ import annotations

from triptych.cost.rates import Rates

RAMP_K = 215.0
"""Inner dimension at which half of the rate is reached (A100, fits its GEMM table)."""

TILE_ELEMENTS = 256 * 128
HALF_FILLED_TILES = 54.0
"""Output tiles at which half of ~108-148 multiprocessors are idle on average."""


def gemm_s(rates: Rates, tokens: float, k: float, n: float, copies: float = 1.0) -> float:
    """Seconds of `copies` products (tokens x k)(k x n), the slower of arithmetic and memory."""
    flops = 2.0 * tokens * k * n * copies
    moved_bytes = copies * (tokens * k + k * n + tokens * n) * rates.element_bytes
    arithmetic_s = flops / (rates.gemm_flops * shape_efficiency(rates, tokens, k, n, copies))
    return max(arithmetic_s, moved_bytes / rates.memory_bytes_per_s)


def shape_efficiency(rates: Rates, tokens: float, k: float, n: float, copies: float = 1.0) -> float:
    """Share of the large-product rate that this shape attains, in (0, 1]. CPUs have no tiles."""
    if rates.is_cpu:
        return 1.0
    tiles = max(1.0, tokens * n * copies / TILE_ELEMENTS)
    return k / (k + RAMP_K) * tiles / (tiles + HALF_FILLED_TILES)
