"""Whole documents packed into rows: which documents share a row.

Best fit over a few open rows: a document goes where it leaves least room, the fullest row is
closed when there are too many. It depends on the lengths and their order alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
import numpy.typing as npt

_OPEN_ROWS = 64

Numbers = npt.NDArray[np.int64]


def pack_rows(lengths: Numbers, capacity: int, *, shared: bool = True) -> Numbers:
    """The row of each document; rows are numbered by their first document.

    Args:
        lengths: positions that each document takes, 0 for one that is left out. [documents]
        capacity: positions of a row; no length is larger.
        shared: False gives each document a row of its own.

    Returns: rows [documents], -1 for documents that are left out.
    """
    rows = np.full(len(lengths), -1, dtype=np.int64)
    if not shared:
        kept = np.flatnonzero(lengths)
        rows[kept] = np.arange(len(kept))
        return rows
    free: list[tuple[int, int]] = []  # (room, row), sorted
    num_rows = 0
    for document, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows[document] = row
        if room > length:
            insort(free, (room - length, row))
        if len(free) > _OPEN_ROWS:
            free.pop(0)  # the fullest
    return rows


def kept_rows(path: Path, lengths: Numbers, capacity: int, *, shared: bool) -> Numbers:
    """As `pack_rows`, kept in a file: packed once."""
    try:
        rows: Numbers = np.load(path)
        if rows.shape == lengths.shape:
            return rows
    except (OSError, ValueError):
        pass
    rows = pack_rows(lengths, capacity, shared=shared)
    partial = path.with_suffix(".part.npy")
    np.save(partial, rows)
    partial.replace(path)
    return rows
