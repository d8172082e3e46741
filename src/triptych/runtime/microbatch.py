"""What a step works on: rows of tokens with their labels, as given and as this rank holds them.

A row may pack several documents. They are kept apart: attention stays inside each, positions
start anew in each, so that a packed row gives the loss and the gradients of its documents run one
by one. Borders are whole numbers on the host, known to every rank of the pipeline, and so cost no
message and no wait for a device. What the last token of a document would predict is the first one
of the next: whoever packs rows gives it the label -100.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from triptych.errors import DataError, Problem
from triptych.plan.context import pieces, sequence_unit
from triptych.plan.plan import Plan
from triptych.plan.ranks import Coordinates
from triptych.runtime.context.tiles import Documents
from triptych.runtime.tensor.loss import IGNORED


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids [B, S] and labels [B, S]: `labels[t]` is the target of position t, -100 none.

    `documents` are the lengths of the documents of each row, in order, where rows are packed.
    `first` is the number of the first row in the global batch. `positions` [B, S] or [1, S] are for
    this rank's own tokens, whose `places` in the row are given where it has not all of them:
    `own_tokens` makes both.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    documents: Documents | None = None
    places: torch.Tensor | None = None
    first: int = 0

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        ids, labels = (x.to(device, non_blocking=True) for x in (self.input_ids, self.labels))
        positions = self.positions
        if positions is not None:
            positions = positions.to(device, non_blocking=True)
        return replace(self, input_ids=ids, labels=labels, positions=positions)


def own_tokens(whole: MicroBatch, plan: Plan, at: Coordinates) -> MicroBatch:
    """A context rank's part of a micro-batch, padded so that it divides over all ranks.

    Raises DataError unless the documents fill their rows.
    """
    documents = whole.documents
    if documents is not None:
        _require_full(documents, whole.input_ids.shape)
    short = -whole.input_ids.shape[1] % sequence_unit(plan)
    ids, labels = whole.input_ids, whole.labels
    if short:  # behind all else, so that no token of the row sees it
        ids, labels = pad(ids, (0, short), value=0), pad(labels, (0, short), value=IGNORED)
        documents = documents and tuple((*row, short) for row in documents)
    positions = None if documents is None else _positions(documents)
    size = plan.stages[at.pp].context
    if size == 1:
        return MicroBatch(ids, labels, positions, documents, first=whole.first)
    parts = pieces(ids.shape[1], size, at.cp, plan.context_method)
    places = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    positions = places[None] if positions is None else positions[:, places]
    ids, labels = ids[:, places], labels[:, places]
    return MicroBatch(ids, labels, positions, documents, places, whole.first)


def _positions(documents: Documents) -> torch.Tensor:
    """[B, S], counted from 0 in each document."""
    rows = [torch.cat([torch.arange(length) for length in row]) for row in documents]
    return torch.stack(rows)


def _require_full(documents: Documents, shape: torch.Size) -> None:
    batch, length = shape
    sums = [sum(row) for row in documents]
    if sums != [length] * batch or any(min(row) < 1 for row in documents):
        what = f"documents of {sums} tokens in {batch} rows of {length}"
        rule = "documents have a token each and fill their rows, padding being one too"
        raise DataError(Problem(what, rule))
