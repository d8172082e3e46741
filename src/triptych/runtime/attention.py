"""Our attention behind the library's attention interface: causal, grouped, sliding windows.

The library makes no mask for a name it does not know (`create_causal_mask` returns None), so
causality and windows are decided here, from the shapes alone. Shapes: B batch, H query heads,
K key/value heads, S new tokens, T all tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.runtime.comm import Communicator
from triptych.runtime.context.ring import ring_attention
from triptych.runtime.recompute import AGAIN

NAME = "triptych"
CONTEXT = "context_ranks"
"""Attribute of an attention module: the communicator over which its sequence is split."""
WEIGHTS = "weights_dropout"
"""Attribute of an attention module: what drops some of its weights [B, H, S, T], given a rate."""

Drop = Callable[[torch.Tensor], torch.Tensor]


def causal_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last S of T tokens; the result is [B, S, H, D].

    If the module says so (`recompute_attention`) it keeps nothing but its inputs.

    `sliding_window` w lets a token see itself and the w - 1 before it. With fewer key than query
    heads, consecutive query heads share one. `softcap` c bends scores to c x tanh(scores / c);
    `dropout` is the rate at which the module drops attention weights.
    """
    assert attention_mask is None, "masks are decided here"
    run: Callable[..., torch.Tensor] = getattr(module, AGAIN, _run_once)
    scale = query_BHSD.shape[-1] ** -0.5 if scaling is None else scaling
    drop = partial(getattr(module, WEIGHTS), rate=dropout) if dropout else None
    core = partial(_attend, module, scale=scale, window=sliding_window, softcap=softcap, drop=drop)
    return run(core, query_BHSD, key_BKTD, value_BKTD).transpose(1, 2), None


def _run_once(core: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return core(*tensors)


def _attend(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    drop: Drop | None,
) -> torch.Tensor:
    """What lies between the projections; [B, H, S, D]."""
    context: Communicator | None = getattr(module, CONTEXT, None)
    if context is not None:
        is_plain = softcap is None and window is None and drop is None
        assert is_plain, "the rules of plans refuse the rest"
        return ring_attention(query_BHSD, key_BKTD, value_BKTD, scale, context)
    new, total = query_BHSD.shape[2], key_BKTD.shape[2]
    if softcap is not None or drop is not None:
        allowed = _allowed(new, total, window, query_BHSD.device)
        return _written_out(query_BHSD, key_BKTD, value_BKTD, allowed, scale, softcap, drop)
    mask = _mask(new, total, window, query_BHSD.device)
    return scaled_dot_product_attention(
        query_BHSD,
        key_BKTD,
        value_BKTD,
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=scale,
        enable_gqa=query_BHSD.shape[1] != key_BKTD.shape[1],
    )


def _mask(new: int, total: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a new token may look; None if plain causality (or one new token) says it all."""
    windowed = window is not None and total > window
    if not windowed and (new == total or new == 1):
        return None
    return _allowed(new, total, window, device)


def _allowed(new: int, total: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[S, T], True where a new token may look."""
    row = torch.arange(total - new, total, device=device)[:, None]
    column = torch.arange(total, device=device)[None, :]
    allowed = column <= row
    if window is not None:
        allowed &= column > row - window
    return allowed


def _written_out(
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    allowed_ST: torch.Tensor,
    scale: float,
    softcap: float | None,
    drop: Drop | None,
) -> torch.Tensor:
    """Attention as products and a softmax: the fused kernels have no place for the tanh of bent
    scores, nor for masks of our own.
    """
    batch, heads, new, dim = query_BHSD.shape
    query_BKGSD = query_BHSD.view(batch, key_BKTD.shape[1], -1, new, dim)
    scores = query_BKGSD @ key_BKTD[:, :, None].transpose(-1, -2)
    scores = scores * (scale / softcap if softcap else scale)
    if softcap is not None:
        scores = torch.tanh(scores) * softcap
    scores = scores.masked_fill(~allowed_ST, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(value_BKTD.dtype)
    if drop is not None:
        weights = drop(weights.flatten(1, 2)).view_as(weights)
    out_BKGSD: torch.Tensor = weights @ value_BKTD[:, :, None]
    return out_BKGSD.reshape(batch, heads, new, dim)


AttentionInterface.register(NAME, causal_attention)
