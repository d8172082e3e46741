"""Seconds of matrix products: tiles over multiprocessors, a ramp over the inner dimension, power.

A product is cut into output tiles, which multiprocessors work off in waves; a last wave that is
not full takes as long as a full one. Large tiles run best, small ones fill a device sooner; few
tiles are cut along the inner dimension too. What lasts runs at the sustained rate: the clock of an
accelerator falls when its power limit is reached. Fits the tables of aiconfigurator to 1 % (A100),
5 % (H100, B200) in the median for 512 rows and more.
"""

from __future__ import annotations

from functools import lru_cache

from triptych.cost.kernels.rates import Rates

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.92),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.6),
)
"""Rows and columns of output tiles, and the rate of each against the largest."""

SPLITS = (2, 4, 8)
"""Parts of the inner dimension when tiles are fewer than multiprocessors."""

POWER_S = 1.2e-3
"""Seconds of a product after which the power limit is felt (llm benchmarks on A100 and H100)."""

KERNEL_S = 3e-6
"""From one kernel's end to the next one's start on an accelerator."""

SHARPNESS = 4
"""Exponent that joins times which overlap but for their ends."""


def gemm_s(rates: Rates, m: float, k: float, n: float, copies: float = 1.0) -> float:
    """Seconds of `copies` products (m x k)(k x n), arithmetic and memory side by side."""
    if m <= 0 or n <= 0 or copies <= 0:
        return 0.0
    if rates.kernels:
        return 2.0 * m * k * n * copies / rates.kernels.products.at(m, k, n)
    moved_bytes = copies * (m * k + k * n + m * n) * rates.element_bytes
    moving_s = moved_bytes / rates.memory_bytes_per_s
    if not rates.multiprocessors:
        return max(2.0 * m * k * n * copies / rates.gemm_flops, moving_s)
    return joined_s(lasting_s(rates, tiled_s(rates, m, k, n, copies)), moving_s) + KERNEL_S


def tiled_s(rates: Rates, m: float, k: float, n: float, copies: float = 1.0) -> float:
    """Seconds of arithmetic at the burst rate, with the tiles that suit the shape best."""
    parts = rates.multiprocessors
    return 2.0 * _tile_work(parts, rates.ramp_k, m, k, n, copies) * parts / rates.burst_flops


@lru_cache(maxsize=100_000)
def _tile_work(parts: int, ramp: float, m: float, k: float, n: float, copies: float) -> float:
    """Multiplications of the busiest multiprocessor, the ramp and the rate of tiles included."""
    best = float("inf")
    for rows, columns, rate in TILES:
        tiles = -(-m // rows) * -(-n // columns) * copies
        area = rows * columns / rate
        best = min(best, -(-tiles // parts) * area * (k + ramp))
        if tiles < parts:
            for split in SPLITS:
                best = min(best, -(-tiles * split // parts) * area * (k / split + ramp))
    return best


def lasting_s(rates: Rates, burst_s: float) -> float:
    """Seconds of arithmetic that would take `burst_s` at the burst rate, under the power limit."""
    length = burst_s / POWER_S
    return burst_s * (1.0 + length) / (1.0 + rates.gemm_flops / rates.burst_flops * length)


def joined_s(one_s: float, other_s: float) -> float:
    """Seconds of two kinds of work that go on side by side: a maximum with a soft knee."""
    longer, shorter = max(one_s, other_s), min(one_s, other_s)
    if not shorter:
        return longer
    return float(longer * (1.0 + (shorter / longer) ** SHARPNESS) ** (1.0 / SHARPNESS))
