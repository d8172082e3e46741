"""Ring attention: queries stay, keys and values of other ranks come by, tile after tile.

In step s rank r gets the keys of rank r - s and computes what its queries see of them
(`tiles.py`). Keys that no rank sees in a step stay where they are, and so does a step without any:
short documents and windows send little. Without either, with chunks r (early) and 2c-1-r (late) on
rank r:

    j = r   plain causal attention within the rank's own tokens
    j < r   all queries attend to the early half of j's keys, none to the late half
    j > r   the late queries attend to all of j's keys, the early ones to none

so every step costs half a block, on every rank alike. In the backward the keys come by once more,
and their gradients go home at once. A ring of one rank is attention over its own tiles.

Source: Liu et al. 2023 (ring attention); the split of Megatron-LM (domain.md section 3).
Cost: K and V of a rank's tokens that are seen sent per rank and step forward; the same and as many
bytes of gradients backward.

On CUDA in 16 bits the tiles of documents and windows go together (`varlen.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from triptych.plan.context import Reach
from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.context import varlen
from triptych.runtime.context.block import Attended, Scores, attend, attend_backward, merge
from triptych.runtime.context.tiles import Sight, Tile, in_chunks, reaches, tiles

MASKED_QUERIES = 256
"""Queries of a tile with a window or written-out scores: bounds its mask and its scores."""


def ring_attention(
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    scores: Scores,
    comm: Communicator | None = None,
) -> torch.Tensor:
    """Causal attention over the sequence of all context ranks; [B, H, S, D] of this rank's tokens.

    The S tokens of a rank are those of `plan.context.pieces`.
    """
    size = comm.size if comm is not None else 1
    length = size * q_BHSD.shape[2]
    window = scores.window if scores.window is not None and scores.window < length else None
    is_masked = window is not None or scores.softcap is not None
    is_cut = is_masked and not varlen.fits(q_BHSD, v_BKSD, scores)
    sight = Sight(
        length=length,
        size=size,
        documents=in_chunks(scores.documents, length, scores.chunk),
        window=window,
        most=MASKED_QUERIES if is_cut else None,
    )
    out: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q_BHSD, k_BKSD, v_BKSD, scores.sinks, scores, sight, comm
    )
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
        sight: Sight,
        comm: Communicator | None,
    ) -> torch.Tensor:
        q, own = q.contiguous(), torch.cat((k, v), dim=-1)
        whole = _nothing(q, v, is_summed=sight.size > 1)
        together = varlen.fits(q, v, scores)
        for visit, kv, tiled in _visits(own, sight, comm):
            if together and varlen.helps(tiled):
                varlen.attend_all(whole, q, *_parted(kv, q), scores, tiled, visit.start)
                continue
            for tile in tiled:
                keys, values = _parted(_of_keys(kv, tile, visit), q)
                _add(whole, tile, attend(_of(q, tile), keys, values, scores, tile))
        if sinks is not None:
            whole = _drained(whole, sinks)
        out = whole.out_BHSD.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        # Laid out as the projection behind reads it, which so keeps no copy of its own.
        ctx.save_for_backward(q, own, out, whole.lse_BHS, sinks)
        ctx.scores, ctx.sight, ctx.comm = scores._replace(sinks=None), sight, comm
        ctx.together = together
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, own, out, lse, sinks = ctx.saved_tensors
        grad, comm = grads[0].contiguous(), ctx.comm
        grad_q, grad_own = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, own))
        returning: list[tuple[Reach, Pending]] = []
        for visit, kv, tiled in _visits(own, ctx.sight, comm):
            grad_kv = torch.zeros_like(kv) if visit.step else grad_own
            if ctx.together and varlen.helps(tiled):
                varlen.attend_all_backward(
                    (grad_q, grad_kv), grad, q, *_parted(kv, q), Attended(out, lse), ctx.scores,
                    tiled, visit.start,
                )  # fmt: skip
                tiled = ()
            for tile in tiled:
                keys, values = _parted(_of_keys(kv, tile, visit), q)
                whole = Attended(_of(out, tile), _of(lse, tile))
                part = attend_backward(
                    _of(grad, tile), _of(q, tile), keys, values, whole, ctx.scores, tile
                )
                _of(grad_q, tile).add_(part[0])
                _of_keys(grad_kv, tile, visit).add_(torch.cat(part[1:], dim=-1))
            _come_home(grad_own, returning)
            if visit.step:
                home = comm.start_shift(grad_kv, torch.empty_like(grad_kv), by=-visit.step)
                returning.append((visit, home))
        _come_home(grad_own, returning)
        grad_k, grad_v = _parted(grad_own.to(own.dtype), q)
        grad_sinks = _sink_gradient(grad, out, lse, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None


# --- whose keys --------------------------------------------------------------------------------


def _visits(
    own: torch.Tensor, sight: Sight, comm: Communicator | None
) -> Iterator[tuple[Reach, torch.Tensor, tuple[Tile, ...]]]:
    """Keys and values of one rank after the other, this one's first, with the tiles to compute."""
    mine = comm.index if comm is not None else 0
    visits = (Reach(0, 0, own.shape[2]), *reaches(sight))
    arriving: Pending | None = None
    for visit, following in zip(visits, (*visits[1:], None), strict=True):
        kv = own if arriving is None else arriving.wait()
        if comm is not None and following is not None:
            seen = own[:, :, following.start : following.stop].contiguous()
            arriving = comm.start_shift(seen, torch.empty_like(seen), by=following.step)
        yield visit, kv, tiles(sight, mine, (mine - visit.step) % sight.size)


def _come_home(grad_own: torch.Tensor, returning: list[tuple[Reach, Pending]]) -> None:
    """Adds the gradients of this rank's keys and values that others have sent back."""
    for visit, pending in returning:
        grad_own[:, :, visit.start : visit.stop] += pending.wait()
    returning.clear()


def _parted(kv: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, as wide as queries, and values, which lie behind them."""
    return kv[..., : q.shape[-1]], kv[..., q.shape[-1] :]


def _of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile's part of what is laid out as queries are."""
    return x[_rows(tile), :, tile.queries]


def _of_keys(kv: torch.Tensor, tile: Tile, visit: Reach) -> torch.Tensor:
    """A tile's part of the keys of a visit, or of what is laid out as they are."""
    return kv[_rows(tile), :, tile.keys.start - visit.start : tile.keys.stop - visit.start]


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)


# --- putting together --------------------------------------------------------------------------


def _nothing(q: torch.Tensor, v: torch.Tensor, is_summed: bool) -> Attended:
    """Room for the result, in fp32 at least where parts are summed."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide if is_summed else q.dtype)
    return Attended(out, q.new_empty(q.shape[:-1], dtype=wide))


def _add(whole: Attended, tile: Tile, part: Attended) -> None:
    """Merges a tile's part into the whole, in place."""
    out, lse = (_of(x, tile) for x in whole)
    if not tile.is_first:
        part = merge(Attended(out, lse), part)
    out.copy_(part.out_BHSD)
    lse.copy_(part.lse_BHS)


def _drained(whole: Attended, sinks_H: torch.Tensor) -> Attended:
    """The whole with the weight that sinks take."""
    lse = torch.logaddexp(whole.lse_BHS, sinks_H[:, None].to(whole.lse_BHS.dtype))
    left = (whole.lse_BHS - lse).exp().unsqueeze(-1)
    return Attended((whole.out_BHSD * left).to(whole.out_BHSD.dtype), lse)


def _sink_gradient(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor | None:
    """A sink has no value: what it takes is missing from the output."""
    if sinks_H is None:
        return None
    taken = (sinks_H[:, None].to(lse.dtype) - lse).exp()
    return -(taken * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
