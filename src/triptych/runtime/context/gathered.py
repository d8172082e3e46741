"""Keys and values of all context ranks, whole on each: for attention that no ring can do.

Scores whose weights are dropped are written out row by row, so a rank needs every key at once.
Shapes: B batch, K key/value heads, s tokens of this rank, S of all, W width.
Cost: an all-gather forward, a reduce-scatter of the gradients backward.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.plan.context import pieces
from triptych.runtime.comm import Communicator


def gather_tokens(x_BKsW: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The tokens of a ring's ranks in the order of the row, [B, K, S, W]."""
    x_sBKW = x_BKsW.permute(2, 0, 1, 3).contiguous()
    x_SBKW: torch.Tensor = _Gather.apply(x_sBKW, comm)  # type: ignore[no-untyped-call]
    chunks = x_SBKW.chunk(2 * comm.size)  # of each rank the early one, then the late one
    return torch.cat((*chunks[::2], *chunks[::-2])).permute(1, 2, 0, 3)


def own_places(length: int, comm: Communicator, device: torch.device) -> torch.Tensor:
    """Where this rank's tokens are in rows of `length`."""
    parts = pieces(length, comm.size, comm.index)
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in parts])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sBKW: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_gather(x_sBKW)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.comm.reduce_scatter(grads[0].contiguous()), None
