"""Whole sequences in one kernel where flash attention has none, on CUDA: flex attention.

Bent scores (a soft cap), and values narrower than keys (latent attention) beside documents, windows
or sinks. Documents and windows are a mask of blocks, of which those that are empty are not
computed. Sinks take their weight afterwards, by the log-sum-exp.

On CPU it gives what tiles give, but has no backward there; it has not yet run on a GPU.

Shapes: B batch, H query heads, K key/value heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from triptych.runtime.context.block import Scores
from triptych.runtime.context.tiles import Documents, in_chunks


def fits(q_BHSD: torch.Tensor) -> bool:
    """True if a compiled kernel is to be had; inside of a compiled layer tiles are."""
    is_narrow = q_BHSD.dtype in (torch.float16, torch.bfloat16)
    return q_BHSD.is_cuda and is_narrow and not torch.compiler.is_compiling()


def flexible_attention(
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    scores: Scores,
    kernel: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Causal attention of all tokens to all tokens, [B, H, S, D]; `kernel` is the compiled one."""
    length = q_BHSD.shape[2]
    documents = in_chunks(scores.documents, length, scores.chunk)
    made: tuple[torch.Tensor, AuxOutput] = (kernel or _compiled())(
        q_BHSD,
        k_BKSD,
        v_BKSD,
        score_mod=None if scores.softcap is None else _bending(scores.softcap),
        block_mask=_mask(documents, scores.window, length, q_BHSD.device),
        scale=scores.scale,
        enable_gqa=q_BHSD.shape[1] != k_BKSD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out, aux = made
    if scores.sinks is None:
        return out
    assert aux.lse is not None
    drained = torch.logaddexp(aux.lse, scores.sinks[:, None].to(aux.lse.dtype))
    return out * (aux.lse - drained).exp().unsqueeze(-1).to(out.dtype)


@cache
def _compiled() -> Callable[..., Any]:
    """The kernel; compiled when it is first called."""
    made: Callable[..., Any] = torch.compile(flex_attention)
    return made


@cache
def _bending(softcap: float) -> Callable[..., torch.Tensor]:
    def bend(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return bend


@lru_cache(maxsize=64)  # a step's micro-batches, both passes, all layers
def _mask(
    documents: Documents | None, window: int | None, length: int, device: torch.device
) -> BlockMask:
    """Blocks of the score matrix that hold a key which a query sees, for each row."""
    rows = documents or ((length,),)
    host = torch.tensor([[i for i, size in enumerate(row) for _ in range(size)] for row in rows])
    if device.type == "cuda":  # pinned, so that the host goes on
        host = host.pin_memory()
    document_RS = host.to(device, non_blocking=True)
    reach = length if window is None else window

    def sees(row: Any, _: Any, query: Any, key: Any) -> Any:
        place = row if len(rows) > 1 else 0
        same = document_RS[place, query] == document_RS[place, key]
        return same & (key <= query) & (query - key < reach)

    return create_block_mask(sees, len(rows), None, length, length, device)
