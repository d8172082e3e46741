"""The tiles of all ranks cover what a token may see, each score once, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from triptych.plan.context import pieces, ring_reaches
from triptych.runtime.context.tiles import Sight, Tile, in_chunks, reaches, tiles

LENGTH = 48
DOCUMENTS = ((5, 7, 12, 1, 23), (48,), (6, 6, 6, 6, 6, 6, 6, 6))


def _allowed(sight: Sight) -> torch.Tensor:
    """[rows, S, S] by the definition."""
    rows = sight.documents or ((LENGTH,),)
    place = torch.arange(LENGTH)
    seen = (place[:, None] >= place[None]).expand(len(rows), -1, -1).clone()
    if sight.window is not None:
        seen &= place[:, None] - place[None] < sight.window
    for row, lengths in enumerate(rows):
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        seen[row] &= document[:, None] == document[None]
    return seen


def _places(sight: Sight, rank: int) -> torch.Tensor:
    held = pieces(LENGTH, sight.size, rank)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in held])


def _scores_of(tile: Tile) -> torch.Tensor:
    """Which scores of its rectangle a tile counts."""
    queries, keys = (s.stop - s.start for s in (tile.queries, tile.keys))
    gap = tile.offset + torch.arange(queries)[:, None] - torch.arange(keys)[None]
    seen = gap >= 0
    if tile.window is not None:
        seen &= gap < tile.window
    assert tile.is_full == bool(seen.all())
    assert seen.any(1).all(), "a query of a tile sees something"
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize("most", [None, 3, 64])
def test_tiles_cover_each_visible_score_once(
    size: int, window: int | None, documents: tuple[tuple[int, ...], ...] | None, most: int | None
) -> None:
    sight = Sight(LENGTH, size, documents, window, most)
    allowed = _allowed(sight)
    counted = torch.zeros_like(allowed, dtype=torch.int)
    for mine, theirs in itertools.product(range(size), repeat=2):
        first = torch.zeros(allowed.shape[:2], dtype=torch.bool)
        for tile in tiles(sight, mine, theirs):
            rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
            queries = _places(sight, mine)[tile.queries]
            keys = _places(sight, theirs)[tile.keys]
            counted[rows, queries[:, None], keys[None]] += _scores_of(tile).int()
            assert tile.is_first == (mine == theirs and not bool(first[rows, queries].any()))
            first[rows, queries] = True
    assert torch.equal(counted, allowed.int())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 7, 20, 47, 48])
def test_the_plan_knows_the_keys_of_other_ranks_that_a_window_reaches(
    size: int, window: int | None
) -> None:
    assert ring_reaches(LENGTH, size, window) == reaches(Sight(LENGTH, size, None, window))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5, 8, 20, 47, 48, 100])
@pytest.mark.parametrize("window", [None, 6])
def test_the_plan_knows_the_keys_of_other_ranks_in_the_same_chunk(
    size: int, chunk: int, window: int | None
) -> None:
    documents = in_chunks(None, LENGTH, chunk)
    sight = Sight(LENGTH, size, documents, window)
    assert ring_reaches(LENGTH, size, window, chunk) == reaches(sight)


def test_chunks_cut_every_document_from_its_beginning() -> None:
    assert in_chunks(None, 48, 20) == ((20, 20, 8),)
    assert in_chunks(((5, 43), (24, 24)), 48, 20) == ((5, 20, 20, 3), (20, 4, 20, 4))
    assert in_chunks(None, 48, 48) is None
    assert in_chunks(None, 48, None) is None


def test_documents_that_end_with_their_chunk_need_no_step_at_all() -> None:
    assert reaches(Sight(LENGTH, 4, ((6,) * 8,))) == ()
    assert reaches(Sight(LENGTH, 4, ((6,) * 8, (5, 7) + (6,) * 6))) == ((1, 5, 6),)


def test_only_the_ends_of_chunks_travel_for_a_window() -> None:
    """Of 12 tokens a rank: from the early chunk to the next rank, from the late one to the last."""
    assert ring_reaches(LENGTH, 4, 4) == ((1, 3, 6), (3, 9, 12))
    assert ring_reaches(LENGTH, 4) == ((1, 0, 12), (2, 0, 12), (3, 0, 12))
