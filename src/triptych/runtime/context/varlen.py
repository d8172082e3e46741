"""The tiles of a visit in one launch of flash attention's variable-length kernel, on CUDA.

Packed documents and windows make many small tiles. What tiles read is laid out token after token,
and those whose masks are alike go to the kernel as sequences of one batch. It sees a tile's last
query at the tile's last key, from where a query looks `left` and `right`; keys and values keep
their own heads. Of each query it gives the log-sum-exp that lets tiles merge.

Has run with the kernel written out in its place, and its shapes with fake CUDA tensors, but not yet
on a GPU.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head size, N tokens of the
tiles of a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from triptych.runtime.context.block import Attended, Scores, merge
from triptych.runtime.context.tiles import Tile

_aten = torch.ops.aten
FREE = -1
"""No bound, in the kernel's words."""


class Mask(NamedTuple):
    """How far queries look: keys before and behind their own place, `FREE` without bound."""

    left: int
    right: int


class Launch(NamedTuple):
    """Tiles that one launch computes, no query twice; each has a row of its own."""

    mask: Mask
    is_first: bool
    tiles: tuple[Tile, ...]


def fits(q_BHSD: torch.Tensor, v_BKTD: torch.Tensor, scores: Scores) -> bool:
    """True if the kernel can do what is asked."""
    is_narrow = q_BHSD.dtype in (torch.float16, torch.bfloat16)
    is_plain = scores.softcap is None and q_BHSD.shape[-1] == v_BKTD.shape[-1]
    return q_BHSD.is_cuda and is_narrow and is_plain and q_BHSD.shape[-1] % 8 == 0


def helps(tiled: Sequence[Tile]) -> bool:
    """True but for a single triangle or rectangle, which needs no layout of its own."""
    return len(tiled) > 1 or any(not (tile.is_full or tile.is_triangle) for tile in tiled)


def mask_of(tile: Tile) -> Mask:
    """A tile's mask, seen from its last query at its last key."""
    queries, keys = (span.stop - span.start for span in (tile.queries, tile.keys))
    shift = tile.offset - (keys - queries)  # how much further a query looks than the kernel thinks
    left = FREE if tile.window is None else tile.window - 1 - shift
    if shift == 0:  # all such tiles are alike, whether their bounds cut anything or not
        return Mask(left, 0)
    is_cut = tile.window is not None and tile.offset + queries > tile.window
    return Mask(left if is_cut else FREE, FREE if tile.offset >= keys - 1 else shift)


@lru_cache(maxsize=1024)  # a step's micro-batches, both passes
def launches(tiled: tuple[Tile, ...], rows: int) -> tuple[Launch, ...]:
    """The tiles of all rows by launch, in an order in which those that are first come first."""
    made: list[tuple[tuple[Mask, bool], list[Tile]]] = []
    for tile in sorted(tiled, key=lambda tile: not tile.is_first):
        own = [tile] if tile.row is not None else [tile._replace(row=row) for row in range(rows)]
        key = (mask_of(tile), tile.is_first)
        for known, others in made:
            if known == key and not any(_meet(a, b) for a in own for b in others):
                others.extend(own)
                break
        else:
            made.append((key, own))
    return tuple(Launch(*key, tuple(tiles)) for key, tiles in made)


def _meet(a: Tile, b: Tile) -> bool:
    """True if two tiles have a query in common."""
    overlap = a.queries.start < b.queries.stop and b.queries.start < a.queries.stop
    return a.row == b.row and overlap


class _Places(NamedTuple):
    """Which tokens a launch reads, and where its sequences begin; int32, on the device."""

    queries_N: torch.Tensor
    keys_N: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


def _places(launch: Launch, queries: int, keys: int, skipped: int, like: torch.Tensor) -> _Places:
    """Places among tokens of rows with so many queries and keys, of which some are `skipped`."""
    spans = [
        [(tile.row or 0, tile.queries.start, tile.queries.stop) for tile in launch.tiles],
        [
            (tile.row or 0, tile.keys.start - skipped, tile.keys.stop - skipped)
            for tile in launch.tiles
        ],
    ]
    lists = [
        [row * length + at for row, start, stop in part for at in range(start, stop)]
        for part, length in zip(spans, (queries, keys), strict=True)
    ]
    sizes = [[stop - start for _, start, stop in part] for part in spans]
    lists += [list(accumulate(part, initial=0)) for part in sizes]
    host = torch.tensor([at for part in lists for at in part], dtype=torch.int32)
    if like.is_cuda:  # pinned, so that the host goes on
        host = host.pin_memory()
    moved = host.to(like.device, non_blocking=True)
    mine, theirs, starts, key_starts = torch.split(moved, [len(part) for part in lists])
    return _Places(mine, theirs, starts, key_starts, max(sizes[0]), max(sizes[1]))


def _tokens(x_BHSD: torch.Tensor) -> torch.Tensor:
    """[B S, H, D]: one token after the other."""
    return x_BHSD.transpose(1, 2).flatten(0, 1)


def _rows(x_NH: torch.Tensor, batch: int) -> torch.Tensor:
    """[B, H, S, ...] of what lies token after token."""
    return x_NH.reshape(batch, -1, *x_NH.shape[1:]).transpose(1, 2)


def attend_all(
    whole: Attended,
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    tiled: tuple[Tile, ...],
    skipped: int,
) -> None:
    """Merges the attention of all tiles of a visit into the whole, in place.

    The first `skipped` keys of a row did not come along.
    """
    q, k, v = (_tokens(x) for x in (q_BHSD, k_BKTD, v_BKTD))
    out, lse = _tokens(whole.out_BHSD), whole.lse_BHS.transpose(1, 2).flatten(0, 1)
    for launch in launches(tiled, len(q_BHSD)):
        at = _places(launch, q_BHSD.shape[2], k_BKTD.shape[2], skipped, q)
        part = _forward(
            q.index_select(0, at.queries_N),
            k.index_select(0, at.keys_N),
            v.index_select(0, at.keys_N),
            at,
            launch.mask,
            scores.scale,
        )
        if not launch.is_first:
            known = (x.index_select(0, at.queries_N) for x in (out, lse))
            part = merge(Attended(*known), part)
        out.index_copy_(0, at.queries_N.long(), part.out_BHSD.to(out.dtype))
        lse.index_copy_(0, at.queries_N.long(), part.lse_BHS.to(lse.dtype))
    for total, found in zip(whole, (out, lse), strict=True):
        total.copy_(_rows(found, len(q_BHSD)))


def attend_all_backward(
    grads: tuple[torch.Tensor, torch.Tensor],
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    whole: Attended,
    scores: Scores,
    tiled: tuple[Tile, ...],
    skipped: int,
) -> None:
    """Adds the gradients of all tiles of a visit to those of queries and of [keys | values]."""
    grad_q, grad_kv = (torch.zeros_like(_tokens(x)) for x in grads)
    tensors = [_tokens(x) for x in (grad_BHSD, q_BHSD, whole.out_BHSD)]
    keys = [_tokens(x) for x in (k_BKTD, v_BKTD)]
    lse = whole.lse_BHS.transpose(1, 2).flatten(0, 1)
    for launch in launches(tiled, len(q_BHSD)):
        at = _places(launch, q_BHSD.shape[2], k_BKTD.shape[2], skipped, tensors[1])
        mine = [x.index_select(0, at.queries_N) for x in (*tensors, lse)]
        theirs = [x.index_select(0, at.keys_N) for x in keys]
        parts = _backward(mine, theirs, at, launch.mask, scores.scale)
        grad_q.index_add_(0, at.queries_N, parts[0].to(grad_q.dtype))
        grad_kv.index_add_(0, at.keys_N, torch.cat(parts[1:], dim=-1).to(grad_kv.dtype))
    for total, part in zip(grads, (grad_q, grad_kv), strict=True):
        total += _rows(part, len(total))


def _forward(
    q_NHD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    at: _Places,
    mask: Mask,
    scale: float,
) -> Attended:
    """Outputs [N, H, D] and log-sum-exp [N, H] of a launch."""
    out, lse_HN, *_ = _aten._flash_attention_forward(
        q_NHD, k_NKD, v_NKD, at.query_starts, at.key_starts, at.most_queries, at.most_keys,
        0.0, mask == Mask(FREE, 0), False, scale=scale,
        window_size_left=mask.left, window_size_right=mask.right,
    )  # fmt: skip
    return Attended(out, lse_HN.T)


def _backward(
    mine: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    at: _Places,
    mask: Mask,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the queries, keys and values of a launch, given the whole output and sums."""
    grad, q, out, lse_NH = mine
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # nothing is dropped
    nothing = torch.empty(0, device=q.device)
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _aten._flash_attention_backward(
        grad, q, *theirs, out, lse_NH.T.contiguous(), at.query_starts, at.key_starts,
        at.most_queries, at.most_keys, 0.0, mask == Mask(FREE, 0), seed, nothing, scale=scale,
        window_size_left=mask.left, window_size_right=mask.right,
    )  # fmt: skip
    return made
