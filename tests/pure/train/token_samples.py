"""Tokens that lie in memory instead of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.train.tokens import Ids, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Tokens):
    ids: Ids
    ends: Ids
    mask: Ids | None

    def open(self) -> Ids:
        return self.ids

    def open_ends(self) -> Ids:
        return self.ends

    def open_mask(self) -> Ids | None:
        return self.mask


def stream(*documents: Sequence[int]) -> Made:
    """Documents, all tokens of which are targets."""
    return _made(documents, None)


def dialogues(*encoded: tuple[Sequence[int], Sequence[int]]) -> Made:
    """Ids and which of them are targets."""
    mask = np.array([t for _, trained in encoded for t in trained], dtype=np.uint8)
    return _made([ids for ids, _ in encoded], mask)


def _made(documents: Sequence[Sequence[int]], mask: Ids | None) -> Made:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return Made(
        path=Path("none"),
        dtype="uint16",
        num_tokens=int(lengths.sum()),
        num_documents=len(documents),
        end_id=0,
        digest="",
        has_mask=mask is not None,
        ids=np.array([i for document in documents for i in document], dtype=np.uint16),
        ends=np.cumsum(lengths),
        mask=mask,
    )
