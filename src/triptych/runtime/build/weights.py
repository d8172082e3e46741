"""First weights that depend on the seed and a parameter's name alone, never on the layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from triptych.plan.families import is_norm
from triptych.plan.layout import Box


def initial_part(
    name: str, shape: Sequence[int], box: Box, *, seed: int, std: float, norm_start: float = 1.0
) -> torch.Tensor:
    """The box of a freshly initialised logical tensor, fp32 on the CPU.

    Norms are `norm_start`, biases zeros, the rest normal with deviation `std`.
    """
    part_shape = [stop - start for start, stop in box]
    if name.endswith("bias"):
        return torch.zeros(part_shape)
    if is_norm(name):
        return torch.full(part_shape, norm_start)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    whole = torch.empty(tuple(shape)).normal_(0.0, std, generator=generator)
    return whole[tuple(slice(start, stop) for start, stop in box)]
