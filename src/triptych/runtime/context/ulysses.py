"""Ulysses: ranks trade tokens for heads, so that attention sees whole sequences of some heads.

One all-to-all brings queries, keys and values of this rank's heads together, another brings the
outputs back to the ranks of their tokens; the backward does the same with gradients. Windows,
documents and bent scores are those of one rank. KV heads that are fewer than the ranks are
repeated.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses); domain.md section 3.
Cost: (c-1)/c of the rank's q, k, v and outputs sent per rank, forward and again backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triptych.runtime.comm import Communicator
from triptych.runtime.context.block import Scores
from triptych.runtime.context.whole import whole_attention


def ulysses_attention(
    q_BHsD: torch.Tensor,
    k_BKsD: torch.Tensor,
    v_BKsD: torch.Tensor,
    scores: Scores,
    comm: Communicator,
    attend: Callable[..., torch.Tensor] = whole_attention,
) -> torch.Tensor:
    """Causal attention over the sequence of all context ranks; [B, H, s, D] of this rank's tokens.

    The s tokens of a rank are a part of the row in order. Query heads divide by the ranks:
    h = H / c of them are this rank's, to which it runs `attend`.
    """
    copies = max(1, comm.size // k_BKsD.shape[1])
    if copies > 1:
        k_BKsD, v_BKsD = (x.repeat_interleave(copies, dim=1) for x in (k_BKsD, v_BKsD))
    if scores.sinks is not None:
        scores = scores._replace(sinks=scores.sinks.chunk(comm.size)[comm.index])
    q_BhSD, k_BkSD, v_BkSD = _tokens_for_heads((q_BHsD, k_BKsD, v_BKsD), comm)
    return _heads_for_tokens(attend(q_BhSD, k_BkSD, v_BkSD, scores), comm)


def _tokens_for_heads(
    tensors_BHsD: tuple[torch.Tensor, ...], comm: Communicator
) -> list[torch.Tensor]:
    """Whole sequences of this rank's heads, [B, h, S, D] each, in one exchange."""
    batch, _, tokens, _ = tensors_BHsD[0].shape
    parts = [  # [c, B, s, h, D]: for each rank its heads
        x.reshape(batch, comm.size, -1, tokens, x.shape[-1]).permute(1, 0, 3, 2, 4)
        for x in tensors_BHsD
    ]
    packed_cBsW = torch.cat([part.flatten(3) for part in parts], dim=-1)
    arrived_cBsW = _exchanged(packed_cBsW, comm)
    made, end = [], 0
    for part in parts:
        start, end = end, end + part.shape[3] * part.shape[4]
        mine_cBshD = arrived_cBsW[..., start:end].reshape(part.shape)
        made.append(mine_cBshD.permute(1, 3, 0, 2, 4).flatten(2, 3))
    return made


def _heads_for_tokens(out_BhSD: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """All heads of this rank's tokens, [B, H, s, D]."""
    batch, heads, _, dim = out_BhSD.shape
    parts_cBhsD = out_BhSD.reshape(batch, heads, comm.size, -1, dim).permute(2, 0, 1, 3, 4)
    return _exchanged(parts_cBhsD, comm).transpose(0, 1).flatten(1, 2)


def _exchanged(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    out: torch.Tensor = _Exchange.apply(tensor.contiguous(), comm)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Part j of dimension 0 to rank j; its own inverse and adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_to_all(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.comm.all_to_all(grads[0].contiguous()), None
