"""Where gradients go: a slot, or several that lie side by side in a bucket as one matrix.

Sinks add in place and tell when a micro-batch has given all it has to give (`buckets.py` listens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from triptych.plan.layout import box_shape
from triptych.runtime.data.bucket import Bucket
from triptych.runtime.data.slot import Slot

Arrived = Callable[[Sequence[Slot], Bucket, bool], None]
"""Takes note of slots of a bucket; the last says whether it was a product."""


class Sink:
    """The gradient of one slot.

    A weight that other modules use too (a tied embedding) is complete when autograd says so.
    """

    def __init__(self, slot: Slot, bucket: Bucket, arrived: Arrived, is_product: bool) -> None:
        self._slots, self._bucket, self._arrived = (slot,), bucket, arrived
        self._is_product, self._is_alone = is_product, len(slot.places) == 1
        self.add, self.add_product, self.add_rows = slot.add, slot.add_product, slot.add_rows

    def arrive(self) -> None:
        """This micro-batch's part is in the slot."""
        if self._is_alone:
            self._arrived(self._slots, self._bucket, self._is_product)


class Neighbours:
    """Matrices of slots that lie side by side, as one: its `values` and the sink of its products.

    They are all used together, so that all of them are filled or none.
    """

    def __init__(self, slots: Sequence[Slot], bucket: Bucket, arrived: Arrived) -> None:
        self._slots, self._bucket, self._arrived = slots, bucket, arrived
        self.values, self._gradient = bucket.as_one(slots)

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input, in place where the types allow it."""
        gradient, grad_NT = self._gradient, grad_TN.t()
        if self._slots[0].filled:
            if grad_NT.dtype == gradient.dtype:
                gradient.addmm_(grad_NT, input_TK)
            else:
                gradient.add_(grad_NT.mm(input_TK))
            return
        self._bucket.open()
        if grad_NT.dtype == gradient.dtype:
            torch.mm(grad_NT, input_TK, out=gradient)
        else:
            gradient.copy_(grad_NT.mm(input_TK))
        for slot in self._slots:
            slot.filled = True

    def arrive(self) -> None:
        """This micro-batch's part is in the slots."""
        self._arrived(self._slots, self._bucket, True)


def are_neighbours(slots: Sequence[Slot]) -> bool:
    """True for trained matrices of equal width without a gap between them."""
    shapes = [box_shape(slot.box) for slot in slots]
    return all(
        one.trains
        and other.trains
        and one.room is other.room
        and one.offset + one.elements == other.offset
        and shape[1] == after[1]
        for (one, other), (shape, after) in zip(pairwise(slots), pairwise(shapes), strict=True)
    )
