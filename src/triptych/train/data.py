"""Micro-batches: which samples a rank trains on at which position of the run.

A global batch is `global_batch` samples at consecutive positions; `plan/share.py` says which of
them a data rank takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from triptych.plan.share import Share
from triptych.train.order import MixtureOrder, Taken
from triptych.train.samples import IGNORED, Batch, Row, Samples, stack


class Arrays(NamedTuple):
    """One micro-batch."""

    input_ids: Batch  # [b, s]
    labels: Batch  # [b, s]: the target of each position; IGNORED where none is trained
    documents: tuple[tuple[int, ...], ...] | None = None  # lengths, row by row, if kept apart


class Rows(Protocol):
    """What training takes: `num_whole` rows, or as many as there will be."""

    @property
    def num_whole(self) -> int | None:
        """Samples; None if they are not known yet and come in an order of their own."""

    def row(self, index: int) -> Row:
        """A sample."""


class TrainingData:
    """A data rank's micro-batches at any position of the run, from one data set or a mixture."""

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        global_batch: int,
        share: Share,
        seed: int,
        weights: Sequence[float] = (1.0,),
    ) -> None:
        self._sources = sources
        self._share = share
        self._global_batch = global_batch
        self._order = MixtureOrder([each.num_whole for each in sources], weights, seed)

    def taken(self, position: int) -> list[Taken]:
        """The samples of the global batch that starts after `position` consumed samples."""
        return [self._order.at(position + place) for place in range(self._global_batch)]

    def microbatches(self, position: int) -> list[Arrays]:
        """The rank's part of that global batch."""
        chunks = self._share.chunks(self._global_batch)
        return [self._chunk(range(position + c.start, position + c.stop)) for c in chunks]

    def _chunk(self, positions: range) -> Arrays:
        taken = [self._order.at(position) for position in positions]
        return Arrays(*stack([self._sources[source].row(sample) for source, sample in taken]))


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
        chunks = self._share.chunks(self._global_batch)
        return [Arrays(*stack([self._row(start + place) for place in chunk])) for chunk in chunks]

    def _row(self, place: int) -> Row:
        if place < self.num_samples:
            return self._samples.row(place)
        row = self._samples.row(0)
        return row._replace(labels=np.full_like(row.labels, IGNORED))
