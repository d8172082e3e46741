"""Our attention behind the library's attention interface: causal, grouped, sliding windows.

The library makes no mask for a name it does not know (`create_causal_mask` returns None), so
causality and windows are decided here, from the shapes alone. Shapes: B batch, H query heads,
K key/value heads, S new tokens, T all tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "triptych"


def causal_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last S of T tokens; the result is [B, S, H, D].

    `sliding_window` w lets a token see itself and the w - 1 before it. With fewer key than query
    heads, consecutive query heads share one.
    """
    assert attention_mask is None, "masks are decided here"
    new, total = query_BHSD.shape[2], key_BKTD.shape[2]
    mask = _mask(new, total, sliding_window, query_BHSD.device)
    out_BHSD = scaled_dot_product_attention(
        query_BHSD,
        key_BKTD,
        value_BKTD,
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=scaling,
        enable_gqa=query_BHSD.shape[1] != key_BKTD.shape[1],
    )
    return out_BHSD.transpose(1, 2), None


def _mask(new: int, total: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a new token may look; None if plain causality (or one new token) says it all."""
    windowed = window is not None and total > window
    if not windowed and (new == total or new == 1):
        return None
    row = torch.arange(total - new, total, device=device)[:, None]
    column = torch.arange(total, device=device)[None, :]
    allowed = column <= row
    if windowed:
        allowed &= column > row - window  # type: ignore[operator]
    return allowed


AttentionInterface.register(NAME, causal_attention)
