"""Pieces: where a parameter's slot meets this rank's shard of its bucket.

Updates run on pieces and checkpoints save them, so names, weight decay and boxes need no special
case, however a bucket is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triptych.plan.layout import box_shape, flat_range_to_boxes, shift
from triptych.runtime.data.bucket import Bucket
from triptych.runtime.data.slot import Slot
from triptych.runtime.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a slot; `here` is where they are in this rank's shard."""

    bucket: Bucket
    slot: Slot
    start: int
    stop: int
    here: slice

    @property
    def gradient(self) -> torch.Tensor:
        """The reduced gradient of these elements, flat."""
        return self.bucket.shard_gradients[self.here]


def pieces_of(bucket: Bucket) -> list[Piece]:
    """The pieces of this rank's shard of a bucket."""
    pieces = []
    for slot in bucket.slots:
        first = max(bucket.start, slot.offset)
        last = min(bucket.stop, slot.offset + slot.elements)
        if first < last:
            piece = Piece(
                bucket=bucket,
                slot=slot,
                start=first - slot.offset,
                stop=last - slot.offset,
                here=slice(first - bucket.start, last - bucket.start),
            )
            pieces.append(piece)
    return pieces


def shards_of(piece: Piece, kind: str, flat_shard: torch.Tensor) -> Iterator[Shard]:
    """Live boxes of a piece: a flat range of a box is a few boxes, one after the other.

    `flat_shard` is this rank's shard of the bucket's tensor of a kind.
    """
    slot, sharding = piece.slot, piece.bucket.sharding
    flat, offset = flat_shard[piece.here].detach(), 0
    # Without sharding every data rank is a replica, and the first one saves.
    saved = slot.counted and sharding.is_first_replica
    for local in flat_range_to_boxes(box_shape(slot.box), piece.start, piece.stop):
        shape = box_shape(local)
        elements = torch.Size(shape).numel()
        yield Shard(
            kind=kind,
            name=slot.name,
            shape=slot.shape,
            box=shift(local, slot.box),
            tensor=flat[offset : offset + elements].view(shape),
            saved=saved,
        )
        offset += elements


def weight_shards(bucket: Bucket) -> list[Shard]:
    """Live boxes of the weights: whole slots, or pieces if values are divided."""
    if bucket.sharding.divides_values:
        return [
            shard
            for piece in pieces_of(bucket)
            for shard in shards_of(piece, "weight", bucket.shard_values)
        ]
    sharding = bucket.sharding
    first = sharding.is_first_replica and sharding.shard.index == 0
    return [
        Shard(
            kind="weight",
            name=slot.name,
            shape=slot.shape,
            box=slot.box,
            tensor=slot.value,
            saved=first and slot.counted,
        )
        for slot in bucket.slots
    ]
