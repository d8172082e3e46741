"""A bucket: parameters in one flat tensor, their gradients in another, moved in one message.

Each of the two tensors is `[shard of rank 0 | shard of rank 1 | ...]` over the shard ranks. What
ZeRO divides is kept as this rank's shard; the whole tensor then has memory only while it is used
(its storage is resized to nothing, so views of it stay valid and live bytes really fall):

    values     shard --all-gather--> whole, used by a unit, released            (ZeRO-3)
    gradients  whole, filled by a backward --reduce-scatter--> shard, released  (ZeRO-2 and 3)

    slot | pad to 64 | slot | pad to 64 | ... | pad to lcm(shard ranks, 128)

A bucket of frozen parameters has values only.

A gradient may be partial over another axis too (`Slot.before`). Sums commute, so that axis comes
last and carries shards only; slots of one bucket share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from triptych.plan.layout import box_shape
from triptych.runtime.comm import Pending
from triptych.runtime.data.sharding import Sharding
from triptych.runtime.data.slot import Slot

ALIGNMENT = 64
PADDING = 128


class Bucket:
    """Slots that travel in one message, their gradients as `reduction`."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sharding: Sharding,
        *,
        values: torch.dtype,
        gradients: torch.dtype,
        reduction: torch.dtype,
        device: torch.device,
        keeps_whole: bool = False,
    ) -> None:
        self.slots = tuple(slots)
        self.trains = slots[0].trains
        self.before = slots[0].before
        self.is_late = slots[0].stage is None
        self.sharding = sharding
        self._reduction = reduction
        # As a forward uses them: experts of a layer then lie one behind the other.
        in_order = self.slots[::-1]
        lay_out = _deal if keeps_whole else _lay_out
        self.elements = padded(lay_out(in_order, sharding.shard.size), sharding.shard.size)
        size = self.elements // sharding.shard.size
        self.start = sharding.shard.index * size
        self.stop = self.start + size
        self.values = torch.zeros(self.elements, dtype=values, device=device)
        size = self.elements if self.trains else 0
        self.gradients = torch.zeros(size, dtype=gradients, device=device)
        self.shard_values = self._part(self.values, sharding.divides_values)
        self.shard_gradients = self._part(self.gradients, sharding.divides_gradients)
        self._gathering: Pending | None = None
        self._scattering: Pending | None = None
        self._summing: Pending | None = None
        self._is_whole = not sharding.divides_values
        self._is_open = not sharding.divides_gradients
        self._holds_gradient = False
        self._is_summed = False
        self._is_last = False
        for slot in slots:
            span = slice(slot.offset, slot.offset + slot.elements)
            slot.room = self
            slot.value = self.values[span].view(box_shape(slot.box))
            if self.trains:
                slot.gradient = self.gradients[span].view(box_shape(slot.box))
        if sharding.divides_values:
            _vacate(self.values)
        if sharding.divides_gradients:
            _vacate(self.gradients)

    def _part(self, whole: torch.Tensor, is_divided: bool) -> torch.Tensor:
        """This rank's shard of a flat tensor: a view, or all that stays of it."""
        part = whole[self.start : self.stop]
        return part.clone() if is_divided else part

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, views can be made: torch makes none of what has no memory."""
        vacant = [x for x in (self.values, self.gradients) if not x.untyped_storage().nbytes()]
        for flat in vacant:
            _occupy(flat)
        yield
        for flat in vacant:
            _vacate(flat)

    def as_one(self, slots: Sequence[Slot]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and gradients of matrices that lie side by side, as one matrix each."""
        span = slice(slots[0].offset, slots[-1].offset + slots[-1].elements)
        columns = box_shape(slots[0].box)[1]
        return self.values[span].view(-1, columns), self.gradients[span].view(-1, columns)

    # ---- values --------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """True while the values have memory: gathered, or on their way."""
        return self._is_whole

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Inside, the slots' values may be written; afterwards each rank keeps its shard."""
        _occupy(self.values)
        yield
        if self.sharding.divides_values:
            self.shard_values.copy_(self.values[self.start : self.stop])
            self._is_whole = True
            self.release()

    def start_gather(self) -> None:
        """Starts making the values whole, if they are not."""
        if not self._is_whole:
            _occupy(self.values)
            self._is_whole = True
            self.start_refresh()

    def start_refresh(self) -> None:
        """Starts spreading updated shards into values that are whole."""
        if self.sharding.shard.size > 1:
            shard = self.sharding.shard
            self._gathering = shard.start_all_gather(self.shard_values, out=self.values)

    def finish_gather(self) -> None:
        """Makes the values usable."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Gives the memory of divided values back; views of them must be gathered again."""
        if self.sharding.divides_values and self._is_whole:
            self.finish_gather()
            _vacate(self.values)
            self._is_whole = False

    # ---- gradients -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forgets the gradients of the last step."""
        self._holds_gradient = self._is_summed = False
        self._forget_arrivals()

    def _forget_arrivals(self) -> None:
        for slot in self.slots:
            slot.filled = slot.arrived = slot.is_final = False

    def open(self) -> None:
        """Makes room for gradients; what is being reduced is taken in first."""
        self.finish_scatter()
        if not self._is_open:
            _occupy(self.gradients)
            self._is_open = True

    @property
    def is_full(self) -> bool:
        """True if every slot has arrived since the last reduction."""
        return all(slot.arrived for slot in self.slots)

    @property
    def is_final(self) -> bool:
        """True if every slot has arrived for the last time in this step."""
        return all(slot.is_final for slot in self.slots)

    @property
    def has_gradient(self) -> bool:
        """True if something was added since the last reduction."""
        return any(slot.filled for slot in self.slots)

    def start_reduce(self) -> None:
        """Starts the reduction over the data axis; slots without a gradient count as zero."""
        self.open()
        for slot in self.slots:
            if not slot.filled:
                slot.gradient.zero_()
        self._is_last = self.is_final
        if self.sharding.shard.size > 1:
            self._scattering = self._start_scatter()
        elif self._is_last:
            self._start_sum()
        if self.sharding.divides_gradients:
            self._forget_arrivals()

    def _start_scatter(self) -> Pending:
        travelling = self.packed(self.gradients)
        if travelling is not self.gradients:
            return self.sharding.shard.start_reduce_scatter(travelling)
        part = self.gradients[self.start : self.stop]
        if self.sharding.divides_gradients and not self._holds_gradient:
            part = self.shard_gradients
        return self.sharding.shard.start_reduce_scatter(self.gradients, out=part)

    def packed(self, gradients: torch.Tensor) -> torch.Tensor:
        """Gradients as they travel: themselves, or a copy in another dtype."""
        return gradients.to(self._reduction)

    def _unpack(self, reduced: torch.Tensor) -> None:
        if reduced.dtype != self.shard_gradients.dtype:
            self.shard_gradients.copy_(reduced)

    def finish_scatter(self) -> None:
        """Takes the reduced part into this rank's shard; divided gradients lose their memory.

        After the last scatter of a step the sum over the replicas starts.
        """
        if self._scattering is None:
            return
        part = self._scattering.wait()
        self._scattering = None
        if self.sharding.divides_gradients and self._holds_gradient:
            self.shard_gradients.add_(part)
        else:
            self._unpack(part)
        if self.sharding.divides_gradients:
            _vacate(self.gradients)
            self._is_open = False
        self._holds_gradient = True
        if self._is_last:
            self._start_sum()

    def finish_own(self) -> None:
        """Ends the scatter; the sum over the replicas is then under way."""
        self.finish_scatter()
        if self.sharding.divides_gradients and not self._holds_gradient:
            self.shard_gradients.zero_()  # nothing of the bucket was used
        self._start_sum()

    def _start_sum(self) -> None:
        if self.sharding.replicas.size > 1 and not self._is_summed:
            travelling = self.packed(self.shard_gradients)
            self._summing = self.sharding.replicas.start_all_reduce(travelling)
        self._is_summed = True

    def finish_reduce(self) -> None:
        """Makes the shard's gradients global sums."""
        if self._summing is not None:
            self._unpack(self._summing.wait())
            self._summing = None
        if self.before is not None:
            self._unpack(self.before.all_reduce(self.packed(self.shard_gradients)))


def padded(elements: int, shards: int) -> int:
    """The size of a bucket that holds so many elements and is divided into so many shards."""
    unit = math.lcm(shards, PADDING)
    return -(-elements // unit) * unit


def _lay_out(slots: Sequence[Slot], shards: int = 1) -> int:
    """Gives each slot its offset; the elements that they take together."""
    del shards  # wherever these end
    end = 0
    for slot in slots:
        slot.offset = end
        end += -(-slot.elements // ALIGNMENT) * ALIGNMENT
    return end


def _deal(slots: Sequence[Slot], shards: int) -> int:
    """Gives each slot its offset, none on two shards; the elements of all shards together.

    The largest slots first, each to the shard with the least.
    """
    ends = [0] * shards
    owners = {}
    for slot in sorted(slots, key=lambda slot: -slot.elements):
        owner = min(range(shards), key=ends.__getitem__)
        owners[id(slot)], slot.offset = owner, ends[owner]
        ends[owner] += -(-slot.elements // ALIGNMENT) * ALIGNMENT
    size = padded(max(ends) * shards, shards) // shards
    for slot in slots:
        slot.offset += owners[id(slot)] * size
    return size * shards


def _occupy(flat: torch.Tensor) -> None:
    """Gives a flat tensor memory, its content arbitrary; nothing if it has some."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def _vacate(flat: torch.Tensor) -> None:
    """Takes a flat tensor's memory away; on CUDA it is used again only after what is queued."""
    flat.untyped_storage().resize_(0)
