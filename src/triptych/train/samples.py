"""Rows of tokens: which inputs and labels a sample has.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         sequence_length 4
    row 0    [t0 t1 t2 t3 t4]                       inputs t0..t3, labels t1..t4
    row 1                [t4 t5 t6 t7 t8]           stride 4: every token is a label once

A stream is cut wherever a row ends; kept apart, its documents see nothing of each other and none
predicts the first token of the next. Packed rows hold whole documents, kept apart, what is left of
a row being one more without labels; a document that is longer than a row is cut.

What is padding is known by its place, never by its id: an end token inside a text is a label and is
seen like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from triptych.train.packing import Numbers, kept_rows, pack_rows
from triptych.train.tokens import Ids, Tokens

IGNORED = -100  # the label of a position that is not trained

Batch = npt.NDArray[np.int64]  # [b, s]


class Row(NamedTuple):
    """A sample of `sequence_length` positions."""

    input_ids: Batch  # [s]
    labels: Batch  # [s]: the target of each position; IGNORED where none is trained
    documents: tuple[int, ...] | None  # lengths, if they are kept apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the tokens of a data set, in one pass over it."""

    documents: int
    tokens: int
    samples: int
    trained: int  # labels
    masked: int  # positions of text that are seen, but whose next token is no target
    padding: int  # positions of rows without text
    truncated_documents: int
    truncated_tokens: int
    dropped_documents: int  # nothing of them could be trained
    dropped_tokens: int

    def to_json(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


class Samples(Protocol):
    """A data set as rows."""

    @property
    def num_whole(self) -> int:
        """Samples that training takes."""

    @property
    def num_samples(self) -> int:
        """Samples that evaluation takes: all, with a shorter last one."""

    @property
    def counts(self) -> Counts:
        """What training makes of the tokens."""

    def row(self, index: int) -> Row:
        """A sample."""


class StreamSamples:
    """Windows over all documents one after the other; `apart`: they do not see each other."""

    def __init__(self, tokens: Tokens, sequence_length: int, *, apart: bool = False) -> None:
        self._tokens, self._ids, self._apart = tokens, tokens.open(), apart
        self._ends = tokens.open_ends()
        self._length = sequence_length
        labels = max(0, tokens.num_tokens - 1)
        self.num_whole = labels // sequence_length
        self.num_samples = -(-labels // sequence_length)

    def row(self, index: int) -> Row:
        """A window."""
        start = index * self._length
        inputs, labels = _row(self._ids[start : start + self._length + 1], self._length)
        if not self._apart:
            return Row(inputs, labels, None)
        filled = min(self._length, self._tokens.num_tokens - 1 - start)
        ends = self._ends[np.searchsorted(self._ends, start, side="right") :]
        ends = ends[: np.searchsorted(ends, start + filled, side="right")] - start
        labels[ends - 1] = IGNORED
        edges = sorted({0, *ends.tolist(), filled, self._length})
        return Row(inputs, labels, tuple(b - a for a, b in pairwise(edges)))

    @property
    def counts(self) -> Counts:
        """Whole windows are trained, the rest is dropped."""
        used = self.num_whole * self._length
        masked = int(np.searchsorted(self._ends, used, side="right")) if self._apart else 0
        return Counts(
            documents=self._tokens.num_documents,
            tokens=self._tokens.num_tokens,
            samples=self.num_whole,
            trained=used - masked,
            masked=masked,
            padding=0,
            truncated_documents=0,
            truncated_tokens=0,
            dropped_documents=0,
            dropped_tokens=max(0, self._tokens.num_tokens - used - 1) if used else 0,
        )


class PackedSamples:
    """Rows of whole documents; `shared` False gives each document a row of its own."""

    def __init__(self, tokens: Tokens, sequence_length: int, *, shared: bool = True) -> None:
        self._tokens, self._ids, self._mask = tokens, tokens.open(), tokens.open_mask()
        self._length = sequence_length
        ends: Numbers = np.asarray(tokens.open_ends(), dtype=np.int64)
        self._starts = np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)].astype(np.int64)
        self._sizes = ends - self._starts
        lengths = np.minimum(self._sizes - 1, sequence_length).clip(min=0)
        self._targets = _sums(self._mask, self._starts + 1, self._starts + 1 + lengths)
        self._lengths: Numbers = np.where(self._targets > 0, lengths, 0)
        rows = self._rows(shared)
        order = np.argsort(rows, kind="stable")
        self._order = order[np.searchsorted(rows[order], 0) :]
        self.num_samples = int(rows.max(initial=-1)) + 1
        self._first = np.searchsorted(rows[self._order], np.arange(self.num_samples + 1))

    def _rows(self, shared: bool) -> Numbers:
        if not self._tokens.path.is_file():
            return pack_rows(self._lengths, self._length, shared=shared)
        kind = "packed" if shared else "single"
        path = self._tokens.path.with_suffix(f".{kind}-{self._length}.npy")
        return kept_rows(path, self._lengths, self._length, shared=shared)

    @property
    def num_whole(self) -> int:
        """Every row has something to train."""
        return self.num_samples

    def documents_of(self, index: int) -> list[int]:
        """The documents in a row."""
        found: list[int] = self._order[self._first[index] : self._first[index + 1]].tolist()
        return found

    def row(self, index: int) -> Row:
        """The documents of a row one after the other, then what is left."""
        parts = [self._document(document) for document in self.documents_of(index)]
        filled = sum(len(inputs) for inputs, _ in parts)
        inputs = np.zeros(self._length, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        inputs[:filled] = np.concatenate([part[0] for part in parts])
        labels[:filled] = np.concatenate([part[1] for part in parts])
        lengths = [len(part[0]) for part in parts]
        left = self._length - filled
        return Row(inputs, labels, (*lengths, left) if left else tuple(lengths))

    def _document(self, document: int) -> tuple[Batch, Batch]:
        start, length = int(self._starts[document]), int(self._lengths[document])
        inputs, labels = _row(self._ids[start : start + length + 1], length)
        if self._mask is not None:
            labels[self._mask[start + 1 : start + length + 1] == 0] = IGNORED
        return inputs, labels

    @property
    def counts(self) -> Counts:
        """Of all documents that are not dropped."""
        kept = self._lengths > 0
        cut = np.where(kept, self._sizes - 1 - self._lengths, 0)
        seen, trained = int(self._lengths.sum()), int(self._targets[kept].sum())
        return Counts(
            documents=self._tokens.num_documents,
            tokens=self._tokens.num_tokens,
            samples=self.num_samples,
            trained=trained,
            masked=seen - trained,
            padding=self.num_samples * self._length - seen,
            truncated_documents=int((cut > 0).sum()),
            truncated_tokens=int(cut.sum()),
            dropped_documents=int((~kept).sum()),
            dropped_tokens=int(self._sizes[~kept].sum()),
        )


def _row(window: Ids, length: int) -> tuple[Batch, Batch]:
    """Inputs and labels of a window of tokens, filled up to `length`."""
    filled = len(window) - 1
    inputs = np.zeros(length, dtype=np.int64)
    labels = np.full(length, IGNORED, dtype=np.int64)
    inputs[:filled] = window[:-1]
    labels[:filled] = window[1:]
    return inputs, labels


def _sums(mask: Ids | None, starts: Numbers, stops: Numbers) -> Numbers:
    """How many of the tokens from each start to its stop are targets."""
    if mask is None or len(mask) == 0:
        return stops - starts
    places = np.stack([starts, stops], axis=1).reshape(-1)
    one_more = np.append(mask, np.uint8(0))  # so that the place behind the last token has a name
    sums: Numbers = np.add.reduceat(one_more, places, dtype=np.int64)[::2]
    return np.where(stops > starts, sums, 0)


def make_samples(tokens: Tokens, sequence_length: int, pack: str) -> Samples:
    """The rows of tokens by `[data] pack`."""
    if pack in ("stream", "documents"):
        return StreamSamples(tokens, sequence_length, apart=pack == "documents")
    return PackedSamples(tokens, sequence_length, shared=pack == "whole")


def stack(rows: Sequence[Row]) -> tuple[Batch, Batch, tuple[tuple[int, ...], ...] | None]:
    """Rows as [b, s] inputs and labels, with the lengths of documents if any keeps them apart."""
    inputs = np.stack([row.input_ids for row in rows])
    labels = np.stack([row.labels for row in rows])
    if all(row.documents is None for row in rows):
        return inputs, labels, None
    length = inputs.shape[1]
    return inputs, labels, tuple(row.documents or (length,) for row in rows)
