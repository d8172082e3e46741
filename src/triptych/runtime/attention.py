"""Our attention behind the library's attention interface.

The library makes no mask for a name it does not know (`create_causal_mask` returns None), so
causality, windows and the borders of documents are decided here, from shapes and whole numbers.
Shapes: B batch, H query heads, K key/value heads, S new tokens, T all tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.model.model import Attention
from triptych.runtime.comm import Communicator
from triptych.runtime.context.block import Scores
from triptych.runtime.context.ring import ring_attention
from triptych.runtime.context.tiles import Documents
from triptych.runtime.context.ulysses import ulysses_attention
from triptych.runtime.context.whole import whole_attention
from triptych.runtime.recompute import AGAIN
from triptych.runtime.written import allowed, dropping_ring, dropping_ulysses, written_attention

NAME = "triptych"
WEIGHTS = "weights_dropout"
"""Attribute of an attention module: what drops some of its weights [B, H, S, T], given a rate."""
_CONTEXT = "attend_over_context_ranks"
_DROPPING = "drop_over_context_ranks"
_CHUNK = "chunk_of_tokens"
_TEMPERATURE = "temperature_by_position"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], torch.Tensor]

_METHODS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "ring": (ring_attention, dropping_ring),
    "ulysses": (ulysses_attention, dropping_ulysses),
}
"""By method of context parallelism: attention, and with some of its weights dropped."""


def split_sequence(attention: torch.nn.Module, comm: Communicator, method: str) -> None:
    """Tells an attention module of the library that its sequences are split over ranks."""
    for name, attend in zip((_CONTEXT, _DROPPING), _METHODS[method], strict=True):
        setattr(attention, name, partial(attend, comm=comm))


def attend_with(attention: torch.nn.Module, attend: Attend) -> None:
    """Tells an attention module of the library what attends in its place: to blocks of a cache."""
    setattr(attention, _CONTEXT, attend)


def is_plain(attention: torch.nn.Module) -> bool:
    """True unless an attention module was told something that changes how its core runs."""
    told = (AGAIN, _CONTEXT, _CHUNK, _TEMPERATURE)
    return not any(hasattr(attention, name) for name in told)


def describe_attention(attention: Any, described: Attention) -> None:
    """Tells an attention module of the library what it tells its mask alone, or gets wrong.

    It scales queries by their place among those that it sees, which are not all.
    """
    if described.chunk is not None:
        setattr(attention, _CHUNK, described.chunk)
    if described.tempered:
        factors = {"floor_scale": attention.floor_scale, "attn_scale": attention.attn_scale}
        setattr(attention, _TEMPERATURE, partial(_tempered, **factors))
        attention.attn_temperature_tuning = False


def _tempered(
    query_BHSD: torch.Tensor, positions_BS: torch.Tensor, floor_scale: float, attn_scale: float
) -> torch.Tensor:
    """Queries scaled by the logarithm of their position (Nakanishi 2025, "Scalable-softmax")."""
    steps_BS = torch.floor((positions_BS.float() + 1.0) / floor_scale)
    scale_BS = torch.log1p(steps_BS) * attn_scale + 1.0
    return (query_BHSD * scale_BS[:, None, :, None]).to(query_BHSD.dtype)


def causal_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    documents: Documents | None = None,
    positions: torch.Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last S of T tokens; the result is [B, S, H, D].

    With fewer key than query heads, consecutive query heads share one. `s_aux` are sinks;
    `positions` [B or 1, S] are those of the queries, each in its document; `dropout` is the rate at
    which the module drops attention weights; all else is as in `Scores`.
    If the module says so (`recompute_attention`) it keeps nothing but its inputs.
    """
    assert attention_mask is None, "masks are decided here"
    run: Callable[..., torch.Tensor] = getattr(module, AGAIN, _run_once)
    scale = query_BHSD.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is None:  # Qwen 2 MoE says it to the mask only
        sliding_window = getattr(module, "sliding_window", None)
    chunk = getattr(module, _CHUNK, None)
    scores = Scores(scale, sliding_window, softcap, documents, s_aux, chunk)
    if (temper := getattr(module, _TEMPERATURE, None)) is not None:
        query_BHSD = temper(query_BHSD, positions)
    attend: Attend = getattr(module, _CONTEXT, whole_attention)
    if dropout:
        drop = partial(getattr(module, WEIGHTS), rate=dropout)
        attend = partial(getattr(module, _DROPPING, written_attention), drop=drop)
    elif query_BHSD.shape[2] != key_BKTD.shape[2]:
        attend = attend_to_cache
    return run(attend, query_BHSD, key_BKTD, value_BKTD, scores).transpose(1, 2), None


def _run_once(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    return attend(q, k, v, scores)


# --- with keys of earlier tokens ---------------------------------------------------------------


def attend_to_cache(
    query_BHSD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention [B, H, S, D] of the last S of T tokens, for inference."""
    assert scores.documents is None, "a cache holds one document a row"
    new, total = query_BHSD.shape[2], key_BKTD.shape[2]
    if scores.softcap is not None or scores.sinks is not None:
        return written_attention(query_BHSD, key_BKTD, value_BKTD, scores)
    return scaled_dot_product_attention(
        query_BHSD,
        key_BKTD,
        value_BKTD,
        attn_mask=_mask(new, total, scores, query_BHSD.device),
        scale=scores.scale,
        enable_gqa=query_BHSD.shape[1] != key_BKTD.shape[1],
    )


def _mask(new: int, total: int, scores: Scores, device: torch.device) -> torch.Tensor | None:
    """True where a new token may look; None if one new token sees everything."""
    if new == 1 and total <= min(scores.window or total, scores.chunk or total):
        return None
    rows_S = torch.arange(total - new, total, device=device)
    return allowed(rows_S, total, scores).view(new, total)  # of one document


AttentionInterface.register(NAME, causal_attention)
