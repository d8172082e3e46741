"""Attention of a tile of queries and keys, with the log-sum-exp that lets tiles merge.

Full tiles and triangles run in the fused flash kernels, on CPU bands do too (with a mask of their
own size). Bent scores, and what a kernel has no place for, are written out.

Shapes: B batch, H query heads, K key/value heads, G = H / K, S queries, T keys, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from triptych.runtime.context.tiles import Documents, Tile

_aten = torch.ops.aten


class Scores(NamedTuple):
    """How scores are made and who sees whom.

    `window` w lets a token see itself and the w - 1 before it. `softcap` c bends scores to
    c x tanh(scores / c). `sinks` [H] are scores of a key without value, which only takes weight.
    With a `chunk` of n tokens a document is seen as documents of n tokens each.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    documents: Documents | None = None
    sinks: torch.Tensor | None = None
    chunk: int | None = None


class Attended(NamedTuple):
    """Partial attention: outputs and the log-sum-exp of their scores."""

    out_BHSD: torch.Tensor
    lse_BHS: torch.Tensor


def attend(
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    tile: Tile,
) -> Attended:
    """Attention of a tile's queries to its keys; each query sees at least one of them."""
    if not _is_fused(q_BHSD, v_BKTD, scores, tile):
        return _written(q_BHSD, k_BKTD, v_BKTD, scores, tile)
    causal = not tile.is_full and tile.is_triangle
    return flash(q_BHSD, k_BKTD, v_BKTD, causal, scores.scale, _added(q_BHSD, k_BKTD, tile))


def attend_backward(
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    whole: Attended,
    scores: Scores,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This tile's part of the gradients of q, k and v, given the *whole* output and log-sum-exp.

    With those the tile's softmax is its part of the whole one, so parts simply add up.
    """
    if not _is_fused(q_BHSD, v_BKTD, scores, tile):
        return _written_backward(grad_BHSD, q_BHSD, k_BKTD, v_BKTD, whole, scores, tile)
    causal = not tile.is_full and tile.is_triangle
    added = _added(q_BHSD, k_BKTD, tile)
    return flash_backward(grad_BHSD, q_BHSD, k_BKTD, v_BKTD, whole, causal, scores.scale, added)


def flash(
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    is_causal: bool,
    scale: float,
    added_ST: torch.Tensor | None = None,
) -> Attended:
    """Attention in a fused kernel; `added` to the scores on CPU only. No gradient."""
    if not q_BHSD.is_cuda:
        return Attended(
            *torch._scaled_dot_product_flash_attention_for_cpu(
                q_BHSD, k_BKTD, v_BKTD, 0.0, is_causal, attn_mask=added_ST, scale=scale
            )
        )
    k, v = _spread(k_BKTD, q_BHSD), _spread(v_BKTD, q_BHSD)
    made = torch._scaled_dot_product_flash_attention(q_BHSD, k, v, 0.0, is_causal, scale=scale)
    return Attended(made[0], made[1])


def flash_backward(
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    whole: Attended,
    is_causal: bool,
    scale: float,
    added_ST: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, given the output and the log-sum-exp."""
    out, lse = whole
    if not q_BHSD.is_cuda:
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                grad_BHSD, q_BHSD, k_BKTD, v_BKTD, out, lse, 0.0, is_causal,
                attn_mask=added_ST, scale=scale,
            )
        )  # fmt: skip
        return grads
    nothing = torch.empty(0, device=q_BHSD.device)
    seed = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)
    shape = (q_BHSD.shape[2], k_BKTD.shape[2])
    k, v = _spread(k_BKTD, q_BHSD), _spread(v_BKTD, q_BHSD)
    grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_backward.default(
        grad_BHSD, q_BHSD, k, v, out, lse.contiguous(), nothing, nothing, *shape,
        0.0, is_causal, seed, seed, scale=scale,
    )  # fmt: skip
    return grad_q, _gather(grad_k, k_BKTD), _gather(grad_v, v_BKTD)


def merge(whole: Attended, part: Attended) -> Attended:
    """Attention over the keys of both: outputs weigh by their share of the softmax's sum."""
    lse = torch.logaddexp(whole.lse_BHS, part.lse_BHS)
    old, new = (
        (x.lse_BHS - lse).exp().unsqueeze(-1).to(whole.out_BHSD.dtype) for x in (whole, part)
    )
    return Attended(whole.out_BHSD * old + part.out_BHSD * new, lse)


def _is_fused(q: torch.Tensor, v: torch.Tensor, scores: Scores, tile: Tile) -> bool:
    """True if a flash kernel can do the tile."""
    if scores.softcap is not None or q.shape[-1] != v.shape[-1]:
        return False
    if not q.is_cuda:
        return True
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0
    return fits and (tile.is_full or tile.is_triangle)


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


# --- who sees whom -----------------------------------------------------------------------------


def _seen(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> torch.Tensor | None:
    """[S, T], True where a query sees a key; None where each sees all."""
    if tile.is_full:
        return None
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(tile.offset)
    return seen if tile.window is None else seen.triu(tile.offset - tile.window + 1)


def _added(q: torch.Tensor, k: torch.Tensor, tile: Tile) -> torch.Tensor | None:
    """What a kernel that knows triangles only adds to the scores of a band."""
    if tile.is_triangle:
        return None
    seen = _seen(q, k, tile)
    if seen is None:
        return None
    return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))


# --- written out -------------------------------------------------------------------------------


def _written(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, tile: Tile
) -> Attended:
    made, _ = _made(q, k, scores, tile)
    lse_BKGS = made.logsumexp(-1)
    weights = (made - lse_BKGS.unsqueeze(-1)).exp().to(v.dtype)
    return Attended((weights @ v[:, :, None]).flatten(1, 2), lse_BKGS.flatten(1, 2))


def _written_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Attended,
    scores: Scores,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made, slope = _made(q, k, scores, tile)
    grad_g, out_g, q_g = (_grouped(x, k) for x in (grad, whole.out_BHSD, q))
    weights = (made - whole.lse_BHS.view(made.shape[:-1]).unsqueeze(-1)).exp()
    own = (grad_g.to(made.dtype) * out_g).sum(-1, keepdim=True)
    inner = weights * ((grad_g @ v[:, :, None].mT).to(made.dtype) - own) * scores.scale
    inner = (inner if slope is None else inner * slope).to(q.dtype)
    grad_q = (inner @ k[:, :, None]).flatten(1, 2)
    return grad_q, (inner.mT @ q_g).sum(2), (weights.to(q.dtype).mT @ grad_g).sum(2)


def _made(
    q: torch.Tensor, k: torch.Tensor, scores: Scores, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [B, K, G, S, T], in fp32 at least, and their slope where they are bent."""
    made = _grouped(q, k) @ k[:, :, None].mT
    made, slope = made.to(torch.promote_types(made.dtype, torch.float32)) * scores.scale, None
    if scores.softcap is not None:
        bent = torch.tanh(made / scores.softcap)
        made, slope = bent * scores.softcap, 1 - bent * bent
    seen = _seen(q, k, tile)
    return made if seen is None else made.masked_fill(~seen, float("-inf")), slope


def _grouped(x_BHSD: torch.Tensor, k_BKTD: torch.Tensor) -> torch.Tensor:
    """[B, K, G, S, D]: the query heads by the key/value head that they share."""
    batch, _, length, dim = x_BHSD.shape
    return x_BHSD.reshape(batch, k_BKTD.shape[1], -1, length, dim)
