"""Samples and micro-batches: which tokens a rank trains on at which position.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         sequence_length 4
    sample 0 [t0 t1 t2 t3 t4]                       inputs t0..t3, labels t1..t4
    sample 1             [t4 t5 t6 t7 t8]           stride 4: every token is a label once

Rows are cut from the stream wherever they end. Kept apart, the documents of a row are named by
their lengths: each ends with its end-of-document token, which then predicts nothing.

A global batch is `global_batch` samples at consecutive positions; `plan/share.py` says which of
them a data rank takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from triptych.errors import DataError, Problem
from triptych.plan.share import Share
from triptych.train.order import SampleOrder
from triptych.train.tokens import Ids, Tokens

IGNORED = -100  # the label of a position that is not trained

Batch = npt.NDArray[np.int64]  # [b, s]


class Arrays(NamedTuple):
    """One micro-batch."""

    input_ids: Batch  # [b, s]
    labels: Batch  # [b, s]: the target of each position; IGNORED where none is trained
    documents: tuple[tuple[int, ...], ...] | None = None  # lengths, row by row, if kept apart


class Samples:
    """Windows of `sequence_length` inputs and labels over a row of tokens.

    `keeps_apart` says that documents must not see each other.
    """

    def __init__(
        self, tokens: Ids, sequence_length: int, end_id: int, keeps_apart: bool = False
    ) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self._end_id = end_id
        self._keeps_apart = keeps_apart
        self.num_whole = max(0, (len(tokens) - 1) // sequence_length)
        """Samples in which every position has a label."""
        self.num_samples = max(0, -(-(len(tokens) - 1) // sequence_length))
        """Samples, with a shorter last one."""

    def batch(self, indices: Sequence[int | None]) -> Arrays:
        """The samples at some indices, [b, s] each; for None one without any label."""
        rows = [self._row(index) for index in indices]
        inputs, labels = (np.stack([row[i] for row in rows]) for i in (0, 1))
        return Arrays(inputs, labels, tuple(r[2] for r in rows) if self._keeps_apart else None)

    def _row(self, index: int | None) -> tuple[Batch, Batch, tuple[int, ...]]:
        """Inputs, labels and the lengths of documents, what is left empty being one more."""
        inputs = np.full(self._length, self._end_id, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        start = (index or 0) * self._length
        window = self._tokens[start : start + self._length + 1] if index is not None else inputs[:1]
        filled = len(window) - 1
        inputs[:filled] = window[:-1]
        labels[:filled] = window[1:]
        ends = np.flatnonzero(inputs[:filled] == self._end_id)
        if self._keeps_apart:
            labels[ends] = IGNORED
        edges = sorted({0, *(ends + 1).tolist(), filled, self._length})
        return inputs, labels, tuple(b - a for a, b in pairwise(edges))


class TrainingData:
    """A data rank's micro-batches at any position of the run."""

    def __init__(self, samples: Samples, *, global_batch: int, share: Share, seed: int) -> None:
        self._samples = samples
        self._share = share
        self._global_batch = global_batch
        self._order = SampleOrder(samples.num_whole, seed)

    def microbatches(self, position: int) -> list[Arrays]:
        """The rank's part of the global batch that starts after `position` consumed samples."""
        chunks = self._share.chunks(self._global_batch)
        return [
            self._samples.batch(self._order.take(position + place for place in chunk))
            for chunk in chunks
        ]


class EvaluationData:
    """A data rank's micro-batches of evaluation text: every token counts once, in every layout."""

    def __init__(
        self, samples: Samples, *, global_batch: int, share: Share, num_batches: int = 0
    ) -> None:
        self._samples = samples
        self._share = share
        self._global_batch = global_batch
        limit = num_batches * global_batch or samples.num_samples
        self.num_samples = min(limit, samples.num_samples)

    def batches(self) -> Iterator[list[Arrays]]:
        """The rank's micro-batches, one list a global batch; the last batch is filled up with
        samples that have no label, so that all ranks run as many.
        """
        for start in range(0, self.num_samples, self._global_batch):
            yield self._microbatches(start)

    def _microbatches(self, start: int) -> list[Arrays]:
        return [
            self._samples.batch([self._index(start + place) for place in chunk])
            for chunk in self._share.chunks(self._global_batch)
        ]

    def _index(self, place: int) -> int | None:
        return place if place < self.num_samples else None


def least_tokens(sequence_length: int, global_batch: int) -> int:
    """The fewest tokens that hold one global batch of samples."""
    return sequence_length * global_batch + 1


def require_enough(
    tokens: Tokens, sequence_length: int, global_batch: int, batch_unit: int = 1
) -> None:
    """Returns if there is a global batch of whole samples. Raises DataError with the counts.

    A batch that works is a multiple of `batch_unit`: what plan and job fix of it.
    """
    num_samples = max(0, (tokens.num_tokens - 1) // sequence_length)
    if num_samples >= global_batch:
        return
    what = (
        f"the training data has {tokens.num_documents} documents with {tokens.num_tokens} tokens: "
        f"{num_samples} samples of {sequence_length} tokens, but the global batch is {global_batch}"
    )
    rule = "one global batch is at most the whole data set"
    remedies = [*_smaller_batch(num_samples, batch_unit), *_shorter(tokens, global_batch)]
    raise DataError(Problem(what, rule, " | ".join([*remedies, "more text"])))


def _smaller_batch(num_samples: int, unit: int) -> Iterator[str]:
    """The largest batch for these samples; what stands in its way if there is none."""
    largest = num_samples // unit * unit
    if largest:
        yield f"[train] global_batch = {largest}" + (" or less" if unit == 1 else "")
    elif num_samples:
        yield (
            f"[train] global_batch = {num_samples} under a plan and a job that divide it: "
            f"now it is a multiple of {unit}"
        )


def _shorter(tokens: Tokens, global_batch: int) -> Iterator[str]:
    """The longest samples for this batch."""
    longest = (tokens.num_tokens - 1) // global_batch
    if longest > 0:
        yield f"[data] sequence_length = {longest} or less"


def require_labels(tokens: Tokens) -> None:
    """Returns if evaluation text has a token to predict. Raises DataError otherwise."""
    if tokens.num_tokens < 2:
        what = f"the evaluation data has {tokens.num_tokens} tokens"
        raise DataError(Problem(what, "evaluation needs a token to predict: 2 tokens", "more text"))
