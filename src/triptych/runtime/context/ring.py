"""Ring attention over the zig-zag split: keys and values travel, queries stay.

In step s a rank r sees the keys of rank j = r - s. With chunks r (early) and 2c-1-r (late):

    j = r   plain causal attention within the rank's own tokens
    j < r   all queries attend to the early half of j's keys, none to the late half
    j > r   the late queries attend to all of j's keys, the early ones to none

so every step costs half a block, on every rank alike. In the backward the gradients of keys and
values travel with them and come home after the last step.

Source: Liu et al. 2023 (ring attention); the split of Megatron-LM (domain.md section 3).
Cost: (c-1) x K and V of a rank's tokens sent per rank forward; the same and as many bytes of
gradients backward.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.context.block import Attended, attend, attend_backward, merge


def ring_attention(
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    scale: float,
    comm: Communicator,
) -> torch.Tensor:
    """Causal attention over the sequence of all context ranks; [B, H, S, D] of this rank's tokens.

    The S tokens of a rank are those of `zigzag_positions`.
    """
    out: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q_BHSD, k_BKSD, v_BKSD, scale, comm
    )
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        comm: Communicator,
    ) -> torch.Tensor:
        q, own = q.contiguous(), torch.stack((k, v))
        half = q.shape[2] // 2
        travelling = _pass_on(own, comm)
        whole = attend(q, own[0], own[1], scale, causal=True)
        for step in range(1, comm.size):
            kv = travelling.wait()
            if step + 1 < comm.size:
                travelling = _pass_on(kv, comm)
            if step <= comm.index:  # keys of a lower rank
                early = kv[:, :, :, :half]
                whole = merge(whole, attend(q, early[0], early[1], scale, causal=False))
            else:
                late = Attended(whole.out_BHSD[:, :, half:], whole.lse_BHS[:, :, half:])
                part = attend(q[:, :, half:], kv[0], kv[1], scale, causal=False)
                whole = _with_late(whole, merge(late, part), half)
        ctx.save_for_backward(q, own, whole.out_BHSD, whole.lse_BHS)
        ctx.scale, ctx.comm = scale, comm
        return whole.out_BHSD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, own, out, lse = ctx.saved_tensors
        comm, scale = ctx.comm, ctx.scale
        grad, whole, half = grads[0].contiguous(), Attended(out, lse), q.shape[2] // 2
        travelling = _pass_on(own, comm)
        grad_q, grad_k, grad_v = attend_backward(grad, q, own[0], own[1], whole, scale, True)
        grad_own, returning = torch.stack((grad_k, grad_v)), None
        for step in range(1, comm.size):
            kv = travelling.wait()
            if step + 1 < comm.size:
                travelling = _pass_on(kv, comm)
            grad_kv = torch.zeros_like(kv)
            if step <= comm.index:
                early = kv[:, :, :, :half]
                part, grad_k, grad_v = attend_backward(
                    grad, q, early[0], early[1], whole, scale, False
                )
                grad_q += part
                grad_kv[:, :, :, :half] = torch.stack((grad_k, grad_v))
            else:
                late = Attended(out[:, :, half:], lse[:, :, half:])
                part, grad_k, grad_v = attend_backward(
                    grad[:, :, half:], q[:, :, half:], kv[0], kv[1], late, scale, False
                )
                grad_q[:, :, half:] += part
                grad_kv = torch.stack((grad_k, grad_v))
            if returning is not None:
                grad_kv += returning.wait()
            returning = _pass_on(grad_kv, comm)
        if returning is not None:
            grad_own += returning.wait()
        return grad_q, grad_own[0], grad_own[1], None, None


def _pass_on(tensor: torch.Tensor, comm: Communicator) -> Pending:
    """To the next rank of the ring, from the previous one."""
    return comm.start_shift(tensor.contiguous(), torch.empty_like(tensor))


def _with_late(whole: Attended, late: Attended, half: int) -> Attended:
    out = torch.cat((whole.out_BHSD[:, :, :half], late.out_BHSD), dim=2)
    return Attended(out, torch.cat((whole.lse_BHS[:, :, :half], late.lse_BHS), dim=2))
