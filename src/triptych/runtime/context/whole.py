"""Attention over whole sequences on one rank: the library's kernel, or tiles where it has none."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.runtime.context import flex, varlen
from triptych.runtime.context.block import Scores
from triptych.runtime.context.ring import ring_attention


def whole_attention(
    q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Causal attention of all tokens to all tokens, [B, H, S, D].

    Documents, windows, bent scores and sinks are computed tile by tile: nothing is as large as
    S x S, and what a window or a border hides is not computed. On CUDA, kernels for variable
    lengths compute all tiles at once, and flexible ones what those cannot.
    """
    length = q_BHSD.shape[2]
    is_local = min(scores.window or length, scores.chunk or length) < length
    if is_local or any(x is not None for x in (scores.softcap, scores.documents, scores.sinks)):
        if flex.fits(q_BHSD) and not varlen.fits(q_BHSD, v_BKSD, scores):
            return flex.flexible_attention(q_BHSD, k_BKSD, v_BKSD, scores)
        return ring_attention(q_BHSD, k_BKSD, v_BKSD, scores)
    return scaled_dot_product_attention(
        q_BHSD,
        k_BKSD,
        v_BKSD,
        is_causal=_decided(length > 1),
        scale=scores.scale,
        enable_gqa=_decided(q_BHSD.shape[1] != k_BKSD.shape[1]),
    )


def _decided(condition: bool) -> bool:
    """The same: what a compiler compares is no bool until a branch asks for it."""
    return True if condition else False  # noqa: SIM210
