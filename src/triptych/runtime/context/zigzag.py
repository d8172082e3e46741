"""Which tokens a context rank holds: two chunks, one early and one late, so that all work alike.

With c ranks a sequence is cut into 2c chunks; rank r holds chunks r and 2c-1-r:

    chunk  0 1 2 3 4 5 6 7
    rank   0 1 2 3 3 2 1 0

Under a causal mask a late token attends to more than an early one; each pair of chunks together
attends to the same number (Megatron-LM context parallelism; domain.md section 3).
"""

from __future__ import annotations

import torch


def zigzag_positions(length: int, size: int, index: int) -> torch.Tensor:
    """The positions of a rank's tokens, ascending: [length / size]; length divides by 2 x size."""
    chunk = length // (2 * size)
    early = torch.arange(index * chunk, (index + 1) * chunk)
    late = torch.arange((2 * size - 1 - index) * chunk, (2 * size - index) * chunk)
    return torch.cat((early, late))
