"""Parameters and gradients in flat buckets, filled in backward order and reduced as they fill.

A bucket holds one flat tensor of values and one of gradients; parameters are views of the first,
gradients are added into the second as the backward makes them. On the last micro-batch a full
bucket starts its reduction over the data axis at once: ZeRO-0 all-reduces, ZeRO-1 reduce-scatters
and later gathers the updated values. Buckets start in the same order on every rank.

Some gradients need a sum over another axis first (`Slot.before`): replicated parameters whose
ranks see different tokens or heads, shared KV heads, a tied embedding on two stages. They have
buckets of their own, which wait for the end of the backward.

    slot | pad to 64 | slot | pad to 64 | ... | pad to lcm(data ranks, 128)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from triptych.plan.families import is_norm
from triptych.plan.layout import Box, box_elements, box_shape
from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.tensor.linear import Linear

ALIGNMENT = 64
PADDING = 128


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One parameter of this rank: its logical name and shape, the box it holds, its duties.

    `counted` is True on the one tensor rank and stage whose gradient enters the norm, which is
    also the one that saves it. `before` sums its gradient ahead of the data axis. `stage` is the
    one that uses the parameter, None if several of this rank's do.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    counted: bool
    before: Communicator | None
    stage: int | None
    places: list[tuple[nn.Module, str]]
    offset: int = 0
    filled: bool = False
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return box_elements(self.box)

    @property
    def decays(self) -> bool:
        """True for matrices: norms and biases have no weight decay."""
        return len(self.shape) > 1 and not is_norm(self.name)

    @property
    def is_late(self) -> bool:
        """True if its gradient is not final when one backward ends."""
        return self.before is not None or self.stage is None

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of the parameter's shape."""
        if self.filled:
            self.gradient.add_(gradient)
        else:
            self.gradient.copy_(gradient)
            self.filled = True

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input, in place where the types allow it."""
        if grad_TN.dtype != self.gradient.dtype:
            self.add(grad_TN.T @ input_TK)
        elif self.filled:
            self.gradient.addmm_(grad_TN.T, input_TK)
        else:
            torch.mm(grad_TN.T, input_TK, out=self.gradient)
            self.filled = True


class Bucket:
    """Slots that are reduced in one message."""

    def __init__(self, slots: Sequence[Slot], data: Communicator) -> None:
        self.slots = tuple(slots)
        self.before = slots[0].before
        self.is_late = slots[0].is_late
        self._data = data
        self._waiting = 0
        self._pending: Pending | None = None
        end = 0
        for slot in slots:
            slot.offset = end
            end += -(-slot.elements // ALIGNMENT) * ALIGNMENT
        unit = math.lcm(data.size, PADDING)
        self.elements = -(-end // unit) * unit

    def allocate(self, values: torch.dtype, gradients: torch.dtype, device: torch.device) -> None:
        """Makes the flat tensors and lets the parameters be views of them."""
        self.values = torch.zeros(self.elements, dtype=values, device=device)
        self.gradients = torch.zeros(self.elements, dtype=gradients, device=device)
        for slot in self.slots:
            span = slice(slot.offset, slot.offset + slot.elements)
            slot.value = self.values[span].view(box_shape(slot.box))
            slot.gradient = self.gradients[span].view(box_shape(slot.box))

    def shard(self, zero: int) -> tuple[int, int]:
        """The range of elements whose optimizer state this rank keeps."""
        if zero == 0:
            return 0, self.elements
        size = self.elements // self._data.size
        return self._data.index * size, (self._data.index + 1) * size

    def begin_step(self) -> None:
        """Forgets the gradients of the last step."""
        self._waiting = len(self.slots)
        for slot in self.slots:
            slot.filled = False

    def arrived(self) -> bool:
        """Notes one more final gradient; True if the bucket is now full."""
        self._waiting -= 1
        return self._waiting == 0

    def start_reduce(self, zero: int) -> None:
        """Starts the reduction over the data axis."""
        if zero == 0:
            self._pending = self._data.start_all_reduce(self.gradients)
        else:
            start, stop = self.shard(zero)
            mine = self.gradients[start:stop]
            self._pending = self._data.start_reduce_scatter(self.gradients, out=mine)

    def finish_reduce(self) -> None:
        """Makes the reduced gradients (of this rank's shard) usable."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def start_gather(self, zero: int) -> Pending:
        """Starts gathering the updated values of all shards (ZeRO-1)."""
        start, stop = self.shard(zero)
        return self._data.start_all_gather(self.values[start:stop], out=self.values)


class GradientBuckets:
    """All buckets of a rank and the hooks that fill them.

    Args:
        slots: in the order in which the backward finishes them.
        bucket_bytes: bytes of gradients after which a bucket is closed.
        zero: ZeRO stage, 0 or 1.

    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        data: Communicator,
        zero: int,
        bucket_bytes: int,
        values: torch.dtype,
        gradients: torch.dtype,
        device: torch.device,
    ) -> None:
        capacity = max(1, bucket_bytes // gradients.itemsize)
        self.buckets = [Bucket(group, data) for group in _group(slots, capacity)]
        self._zero = zero
        self._final: set[tuple[int, bool]] = set()
        self._next = 0
        self._full: set[int] = set()
        for index, bucket in enumerate(self.buckets):
            bucket.allocate(values, gradients, device)
            for slot in bucket.slots:
                self._attach(slot, index)

    @property
    def slots(self) -> list[Slot]:
        """Every parameter of the rank, in backward order within its kind."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def begin_step(self) -> None:
        """Makes ready for the first backward of a step."""
        self._final.clear()
        self._next = 0
        self._full.clear()
        for bucket in self.buckets:
            bucket.begin_step()

    def begin_final(self, stage: int, weights: bool) -> None:
        """From now on what arrives for a stage is final: products of its linears, or the rest."""
        self._final.add((stage, weights))

    def finish(self) -> None:
        """Ends every reduction; gradients (of this rank's shards) are then global sums."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if not slot.filled:
                    slot.gradient.zero_()
        for bucket in self.buckets[self._next :]:
            if bucket.before is not None:
                bucket.before.all_reduce(bucket.gradients)
            bucket.start_reduce(self._zero)
        for bucket in self.buckets:
            bucket.finish_reduce()

    def gather_values(self) -> None:
        """Makes every parameter whole again after a sharded update."""
        if self._zero == 0:
            return
        for pending in [bucket.start_gather(self._zero) for bucket in self.buckets]:
            pending.wait()

    def _attach(self, slot: Slot, bucket_index: int) -> None:
        parameter = nn.Parameter(slot.value)
        for module, attribute in slot.places:
            setattr(module, attribute, parameter)
            if isinstance(module, Linear) and attribute == "weight":
                module.sink = _WeightSink(slot, self, bucket_index)
        hook = self._hook(slot, bucket_index)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, slot: Slot, bucket_index: int) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # all of it went through the linear's sink
                return
            slot.add(parameter.grad)
            parameter.grad = None
            self.arrived(slot, bucket_index, weights=False)

        return add

    def arrived(self, slot: Slot, bucket_index: int, weights: bool) -> None:
        """Notes a gradient; starts the bucket's reduction if it is now full."""
        is_final = slot.stage is not None and (slot.stage, weights) in self._final
        if is_final and self.buckets[bucket_index].arrived():
            self._filled(bucket_index)

    def _filled(self, bucket_index: int) -> None:
        """Starts every bucket whose turn it is: the order must be the same on all ranks."""
        self._full.add(bucket_index)
        while self._next in self._full and not self.buckets[self._next].is_late:
            self.buckets[self._next].start_reduce(self._zero)
            self._next += 1


def _group(slots: Iterable[Slot], capacity: int) -> list[list[Slot]]:
    """Slots to buckets of about `capacity` elements: ordinary ones first, then the late ones."""
    kinds: dict[tuple[bool, int], list[list[Slot]]] = {}
    for slot in slots:
        before = 0 if slot.before is None else id(slot.before)
        groups = kinds.setdefault((slot.is_late, before), [[]])
        if groups[-1] and sum(s.elements for s in groups[-1]) + slot.elements > capacity:
            groups.append([])
        groups[-1].append(slot)
    ordinary = kinds.pop((False, 0), [])
    return [group for group in ordinary if group] + [g for gs in kinds.values() for g in gs]


class _WeightSink:
    """Lets a linear add its weight gradient to a slot and tell the bucket.

    A weight that other modules use too (a tied embedding) is complete when autograd says so.
    """

    def __init__(self, slot: Slot, buckets: GradientBuckets, bucket_index: int) -> None:
        self._slot, self._buckets, self._index = slot, buckets, bucket_index
        self.add_product = slot.add_product

    def arrive(self) -> None:
        """The linear's part of this micro-batch is in the slot."""
        if len(self._slot.places) == 1:
            self._buckets.arrived(self._slot, self._index, weights=True)
