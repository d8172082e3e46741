"""Which parts of the score matrix are computed: rectangles, chosen on the host from whole numbers.

A token sees the tokens before it and itself, in its own document only, and with a window w no
further back than w - 1 tokens. Between a piece of queries and a piece of keys that leaves

    the same piece     per document a triangle
    an earlier piece   the one document that reaches from one to the other: a full rectangle
    a later piece      nothing

so documents need no mask at all. A window cuts long triangles into bands, `most` queries each.
Nothing here looks at a tensor: borders and windows are known before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from triptych.plan.context import Piece, Reach, pieces

Documents = tuple[tuple[int, ...], ...]
"""For each row of a micro-batch the lengths of its documents, in order; they fill the row.

One row's are those of all rows.
"""


class Sight(NamedTuple):
    """Who sees whom: rows of `length` tokens over `size` ranks.

    `most` bounds the queries of a tile whose scores are masked or written out.
    """

    length: int
    size: int = 1
    documents: Documents | None = None
    window: int | None = None
    most: int | None = None


@lru_cache(maxsize=1024)
def in_chunks(documents: Documents | None, length: int, chunk: int | None) -> Documents | None:
    """Documents of at most `chunk` tokens: those of rows of `length` tokens, cut from the left."""
    if chunk is None or (documents is None and length <= chunk):
        return documents
    rows = documents or ((length,),)
    return tuple(
        tuple(min(chunk, size - start) for size in row for start in range(0, size, chunk))
        for row in rows
    )


class Tile(NamedTuple):
    """A rectangle of the score matrix; indices are local to the ranks that hold the tokens.

    `offset` is how far the first query lies behind the first key; `row` is None for all rows.
    `is_first` says that no earlier tile has these queries.
    """

    row: int | None
    queries: slice
    keys: slice
    offset: int
    window: int | None
    is_first: bool

    def __hash__(self) -> int:
        """Slices have none before Python 3.12."""
        spans = (self.queries, self.keys)
        return hash((self.row, self.offset, *((span.start, span.stop) for span in spans)))

    @property
    def is_full(self) -> bool:
        """True if every query sees every key."""
        queries, keys = _length(self.queries), _length(self.keys)
        return keys <= self.offset + 1 and not self._is_cut(queries)

    @property
    def is_triangle(self) -> bool:
        """True if a query sees the keys up to its own place, and there are as many of both."""
        queries, keys = _length(self.queries), _length(self.keys)
        return self.offset == 0 and queries == keys and not self._is_cut(queries)

    def _is_cut(self, queries: int) -> bool:
        return self.window is not None and self.offset + queries > self.window


def _length(span: slice) -> int:
    return int(span.stop - span.start)


@lru_cache(maxsize=1024)  # a step's micro-batches, both passes
def tiles(sight: Sight, mine: int, theirs: int) -> tuple[Tile, ...]:
    """The tiles of rank `mine`'s queries over rank `theirs`'s keys."""
    if sight[2:] == (None, None, None) and sight.size > 1:
        return (_plain(sight, mine, theirs),)
    queries, keys = (pieces(sight.length, sight.size, rank) for rank in (mine, theirs))
    pairs = [(q, k) for q in queries for k in keys if k.start <= q.start]
    pairs.sort(key=lambda pair: pair[0].start != pair[1].start)  # those that are first, first
    documents = sight.documents or ((sight.length,),)
    rows = enumerate(documents) if len(documents) > 1 else [(None, documents[0])]
    return tuple(
        tile
        for row, lengths in rows
        for q, k in pairs
        for start, stop in pairwise(accumulate(lengths, initial=0))
        for tile in _cut(row, _within(q, start, stop), _within(k, start, stop), sight)
    )


@lru_cache(maxsize=1024)
def reaches(sight: Sight) -> tuple[Reach, ...]:
    """The steps in which some rank r sees keys of rank r - step, and which; see `plan.context`."""
    found = []
    for step in range(1, sight.size):
        pairs = ((rank, (rank - step) % sight.size) for rank in range(sight.size))
        seen = [tile.keys for mine, theirs in pairs for tile in tiles(sight, mine, theirs)]
        if seen:
            found.append(Reach(step, min(s.start for s in seen), max(s.stop for s in seen)))
    return tuple(found)


def _plain(sight: Sight, mine: int, theirs: int) -> Tile:
    """Both chunks of a rank at once: one triangle, or half a block."""
    part = sight.length // sight.size
    whole, early, late = slice(0, part), slice(0, part // 2), slice(part // 2, part)
    if mine == theirs:
        return Tile(None, whole, whole, 0, None, is_first=True)
    if theirs < mine:  # all queries, the late ones most of all, lie behind the early keys
        return Tile(None, whole, early, sight.length, None, is_first=False)
    return Tile(None, late, whole, sight.length, None, is_first=False)


def _within(piece: Piece, start: int, stop: int) -> Piece:
    """The part of a piece that lies in a document; it may be empty."""
    first = max(piece.start, start)
    return Piece(piece.at + first - piece.start, first, min(piece.stop, stop))


def _cut(row: int | None, queries: Piece, keys: Piece, sight: Sight) -> Iterator[Tile]:
    """The tiles of one document: one, or bands of `most` queries."""
    window = sight.window
    stop = queries.stop if window is None else min(queries.stop, keys.stop + window - 1)
    if keys.start >= keys.stop:
        return
    size = sight.most or max(1, stop - queries.start)
    for first in range(queries.start, stop, size):
        last = min(first + size, stop)
        seen = keys.start if window is None else max(keys.start, first - window + 1)
        yield Tile(
            row,
            slice(queries.at + first - queries.start, queries.at + last - queries.start),
            slice(keys.at + seen - keys.start, keys.at + min(keys.stop, last) - keys.start),
            first - seen,
            window,
            is_first=queries.start == keys.start,
        )
