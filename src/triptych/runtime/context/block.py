"""Attention of a block of queries to a block of keys, with the log-sum-exp that lets blocks merge.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_aten = torch.ops.aten


class Attended(NamedTuple):
    """Partial attention: outputs and the log-sum-exp of their scores."""

    out_BHSD: torch.Tensor
    lse_BHS: torch.Tensor


def attend(
    q_BHSD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scale: float, causal: bool
) -> Attended:
    """Attention of one block, causal from the top left or full."""
    k, v = _spread(k_BKTD, q_BHSD), _spread(v_BKTD, q_BHSD)
    if q_BHSD.is_cuda:
        result = _aten._scaled_dot_product_flash_attention(q_BHSD, k, v, 0.0, causal, scale=scale)
    else:
        result = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSD, k, v, 0.0, causal, scale=scale
        )
    return Attended(result[0], result[1])


def attend_backward(
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    whole: Attended,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of q, k and v, given the *whole* output and log-sum-exp.

    With those the block's softmax is its part of the whole one, so parts simply add up.
    """
    k, v = _spread(k_BKTD, q_BHSD), _spread(v_BKTD, q_BHSD)
    out, lse = whole
    if q_BHSD.is_cuda:
        nothing = torch.empty(0, device=q_BHSD.device)
        seed = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)
        shape = (q_BHSD.shape[2], k.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_BHSD, q_BHSD, k, v, out, lse, nothing, nothing, *shape, 0.0, causal, seed, seed,
            scale=scale,
        )  # fmt: skip
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHSD, q_BHSD, k, v, out, lse, 0.0, causal, scale=scale
        )
    grad_q, grad_k, grad_v = grads
    return grad_q, _gather(grad_k, k_BKTD), _gather(grad_v, v_BKTD)


def merge(whole: Attended, part: Attended) -> Attended:
    """Attention over the keys of both: outputs weigh by their share of the softmax's sum."""
    lse = torch.logaddexp(whole.lse_BHS, part.lse_BHS)
    old, new = (
        (x.lse_BHS - lse).exp().unsqueeze(-1).to(whole.out_BHSD.dtype) for x in (whole, part)
    )
    return Attended(whole.out_BHSD * old + part.out_BHSD * new, lse)


def _spread(x_BKTD: torch.Tensor, q_BHSD: torch.Tensor) -> torch.Tensor:
    """Repeats key/value heads for the query heads that share them: [B, H, T, D]."""
    group = q_BHSD.shape[1] // x_BKTD.shape[1]
    return x_BKTD if group == 1 else x_BKTD.repeat_interleave(group, dim=1)


def _gather(grad_BHTD: torch.Tensor, x_BKTD: torch.Tensor) -> torch.Tensor:
    """The adjoint of `_spread`: sums over the query heads of a key/value head."""
    heads = x_BKTD.shape[1]
    if grad_BHTD.shape[1] == heads:
        return grad_BHTD
    grad_BHTD = grad_BHTD.contiguous()
    batch, _, length, dim = grad_BHTD.shape
    return grad_BHTD.view(batch, heads, -1, length, dim).sum(dim=2)
