"""Attention as products and a softmax, scores written out: what fused kernels have no place for.

Weights are dropped here, and new tokens look at a cache through bent scores or sinks.
Shapes: B batch, H query heads, K key/value heads, S new tokens, T all tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from triptych.runtime.comm import Communicator
from triptych.runtime.context.block import Scores
from triptych.runtime.context.gathered import gather_tokens, own_places
from triptych.runtime.context.tiles import Documents, in_chunks
from triptych.runtime.context.ulysses import ulysses_attention

Drop = Callable[..., torch.Tensor]
"""Drops some of weights [B, H, S, T]. `rows` are the places [S] of the queries if they are not all,
`part` says which of so many parts of the module's heads these are.
"""


def written_attention(
    query_BHSD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    scores: Scores,
    drop: Drop | None = None,
    rows_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention [B, H, S, D] of queries at places `rows_S`, or of the last S, to T keys."""
    batch, heads, new, dim = query_BHSD.shape
    query_BKGSD = query_BHSD.view(batch, key_BKTD.shape[1], -1, new, dim)
    made = query_BKGSD @ key_BKTD[:, :, None].transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        made = torch.tanh(made / scores.softcap) * scores.softcap
    total = key_BKTD.shape[2]
    if rows_S is None:
        rows_S = torch.arange(total - new, total, device=query_BHSD.device)
    made = made.masked_fill(~allowed(rows_S, total, scores), float("-inf"))
    if scores.sinks is not None:  # one more key, without value
        sinks = scores.sinks.to(made.dtype).view(1, key_BKTD.shape[1], -1, 1, 1)
        made = torch.cat((made, sinks.expand(*made.shape[:-1], 1)), dim=-1)
    weights = made.softmax(-1, dtype=torch.promote_types(made.dtype, torch.float32))
    seen = weights[..., :total].to(value_BKTD.dtype)
    if drop is not None:
        seen = drop(seen.flatten(1, 2)).view_as(seen)
    out_BKGSD: torch.Tensor = seen @ value_BKTD[:, :, None]
    return out_BKGSD.reshape(batch, heads, new, -1)


def allowed(rows_S: torch.Tensor, total: int, scores: Scores) -> torch.Tensor:
    """[S, T], or with documents [B, 1, 1, S, T]: True where the token at a place may look."""
    row, column = rows_S[:, None], torch.arange(total, device=rows_S.device)[None, :]
    found = column <= row
    if scores.window is not None:
        found &= column > row - scores.window
    documents = in_chunks(scores.documents, total, scores.chunk)
    return found if documents is None else found & _same_document(documents, rows_S)


def _same_document(documents: Documents, rows_S: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, S, T], True where both tokens are of one document."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in documents]
    number_BT = torch.stack(rows).to(rows_S.device)
    return (number_BT[:, rows_S, None] == number_BT[:, None, :])[:, None, None]


# ---- weights dropped, over context ranks ------------------------------------------------------


def dropping_ring(
    q_BHsD: torch.Tensor,
    k_BKsD: torch.Tensor,
    v_BKsD: torch.Tensor,
    scores: Scores,
    drop: Drop,
    comm: Communicator,
) -> torch.Tensor:
    """This rank's queries to all ranks' keys, which are gathered whole: dropping cannot merge."""
    whole = gather_tokens(torch.cat((k_BKsD, v_BKsD), dim=-1), comm)
    key, value = torch.split(whole, [k_BKsD.shape[-1], v_BKsD.shape[-1]], dim=-1)
    rows_S = own_places(key.shape[2], comm, q_BHsD.device)
    return written_attention(q_BHsD, key, value, scores, partial(drop, rows=rows_S), rows_S)


def dropping_ulysses(
    q_BHsD: torch.Tensor,
    k_BKsD: torch.Tensor,
    v_BKsD: torch.Tensor,
    scores: Scores,
    drop: Drop,
    comm: Communicator,
) -> torch.Tensor:
    """Whole sequences of this rank's part of the heads."""
    mine = partial(written_attention, drop=partial(drop, part=(comm.index, comm.size)))
    return ulysses_attention(q_BHsD, k_BKsD, v_BKsD, scores, comm, mine)
