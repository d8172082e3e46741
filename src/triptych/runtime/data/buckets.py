"""All buckets of a rank: which parameter goes into which, and when each is reduced.

Gradients arrive while a backward runs: from autograd's hooks, and from our linears, which add
their products in place. A bucket whose last gradient of the step has come starts its reduction at
once, behind the rest of the backward; with `reduces_each` one that has a gradient of every slot
does so in each micro-batch. At most two buckets of divided gradients have memory: one that fills,
one that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product

import torch
from torch import nn

from triptych.runtime.data.bucket import Bucket
from triptych.runtime.data.sharding import Shardings
from triptych.runtime.data.sinks import Neighbours, Sink, are_neighbours
from triptych.runtime.data.slot import Slot
from triptych.runtime.tensor.linear import Linear
from triptych.runtime.tensor.shard import VocabularyParallelEmbedding


class GradientBuckets:
    """All buckets of a rank and the hooks that fill them.

    Args:
        slots: in the order in which the backward finishes them.
        shardings: what is divided among whom, of dense parameters and of experts.
        unit_of: the unit of a slot: with divided values no bucket holds slots of two.
        whole: slots that no shard may cut, if there are such.
        together: what a bucket holds all slots of, whatever its size; None: nothing.
        bucket_bytes: bytes of gradients after which a bucket is closed.
        values, gradients, reduction: dtypes of what is kept, and of gradients that travel.

    """

    def __init__(
        self,
        slots: Sequence[Slot],
        shardings: Shardings,
        unit_of: Callable[[Slot], Hashable],
        *,
        whole: Callable[[Slot], bool] = lambda _: False,
        together: Callable[[Slot], Hashable] | None = None,
        bucket_bytes: int,
        values: torch.dtype,
        gradients: torch.dtype,
        reduction: torch.dtype,
        device: torch.device,
    ) -> None:
        capacity = max(1, bucket_bytes // gradients.itemsize)
        groups: list[list[Slot]] = []
        for sharding, is_whole in product(dict.fromkeys(shardings), (False, True)):
            mine = [
                slot
                for slot in slots
                if shardings.of_slot(slot) == sharding and whole(slot) == is_whole
            ]
            room = _room(mine, sharding.shard.size) if is_whole else 0
            by_unit = sharding.divides_values
            by_size = partial(_by_size, capacity=max(capacity, room), together=together or _alone)
            groups += _by_unit(mine, unit_of) if by_unit else by_size(mine)
        make = partial(Bucket, values=values, gradients=gradients, reduction=reduction)
        self.buckets = [
            make(group, shardings.of_slot(group[0]), device=device, keeps_whole=whole(group[0]))
            for group in _as_completed(slots, groups)
        ]
        self.trained = [bucket for bucket in self.buckets if bucket.trains]
        self._in_turn = [b for b in self.trained if not b.sharding.reduces_each]
        self._final: set[tuple[int, bool]] = set()
        self._next = 0
        self._travelling: list[Bucket] = []
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._attach(slot, bucket)

    @property
    def divides_values(self) -> bool:
        """True if some parameters are whole only while they are used."""
        return any(bucket.sharding.divides_values for bucket in self.buckets)

    @property
    def slots(self) -> list[Slot]:
        """Every parameter of the rank, in backward order within its bucket."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    def begin_step(self) -> None:
        """Makes ready for the first backward of a step."""
        self._final.clear()
        self._next = 0
        for bucket in self.trained:
            bucket.begin_step()

    def begin_final(self, stage: int, weights: bool) -> None:
        """From now on what arrives for a stage is final: products of its linears, or the rest."""
        self._final.add((stage, weights))

    def finish(self) -> None:
        """Ends every reduction; gradients (of this rank's shards) are then global sums."""
        late = [b for b in self.trained if b.sharding.reduces_each and b.has_gradient]
        for bucket in (*self._in_turn[self._next :], *late):
            self._start(bucket)
        self._travelling.clear()
        for bucket in self.trained:
            bucket.finish_own()
        for bucket in self.trained:
            bucket.finish_reduce()
        self.release()

    def release(self) -> None:
        """Gives the memory of divided values back."""
        for bucket in self.buckets:
            bucket.release()

    def gather_values(self) -> None:
        """Takes updated shards into the parameters: at once, or when a unit is next used."""
        self.release()
        kept = [bucket for bucket in self.trained if not bucket.sharding.divides_values]
        for bucket in kept:
            bucket.start_refresh()
        for bucket in kept:
            bucket.finish_gather()

    def _attach(self, slot: Slot, bucket: Bucket) -> None:
        # `.data` has a version counter of its own: gathering again is no change of the values.
        parameter = nn.Parameter(slot.value.data, requires_grad=slot.trains)
        for module, attribute in slot.places:
            setattr(module, attribute, parameter)
            if slot.trains and isinstance(module, Linear) and attribute == "weight":
                module.sink = Sink(slot, bucket, self.arrived, is_product=True)
            alone = slot.trains and len(slot.places) == 1
            if alone and isinstance(module, VocabularyParallelEmbedding):
                module.sink = Sink(slot, bucket, self.arrived, is_product=False)
        if not slot.trains:
            return
        hook = self._hook(slot, bucket)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def sink_of(self, slot: Slot) -> Sink | None:
        """Where the gradient of a norm or bias can go without autograd; None if it is frozen."""
        if not slot.trains:
            return None
        return Sink(slot, self._bucket_of(slot), self.arrived, is_product=False)

    def as_one(self, slots: Sequence[Slot]) -> Neighbours | None:
        """Matrices of a stage as one, if they train and lie side by side."""
        if not are_neighbours(slots):
            return None
        return Neighbours(slots, self._bucket_of(slots[0]), self.arrived)

    @contextmanager
    def in_memory(self, module: nn.Module) -> Iterator[None]:
        """Inside, views can be made of what the parameters of a module lie in."""
        modules = set(module.modules())
        with ExitStack() as stack:
            for bucket in self.buckets:
                if any(place[0] in modules for slot in bucket.slots for place in slot.places):
                    stack.enter_context(bucket.in_memory())
            yield

    def _bucket_of(self, slot: Slot) -> Bucket:
        return next(bucket for bucket in self.buckets if bucket is slot.room)

    def _hook(self, slot: Slot, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # all of it went through a sink
                return
            slot.add(parameter.grad)
            parameter.grad = None
            self.arrived((slot,), bucket, False)

        return add

    def arrived(self, slots: Sequence[Slot], bucket: Bucket, weights: bool) -> None:
        """Notes gradients of slots of a stage; starts the bucket's reduction if it is now full."""
        stage = slots[0].stage
        is_final = stage is not None and (stage, weights) in self._final
        for slot in slots:
            slot.arrived, slot.is_final = True, is_final
        if not bucket.sharding.reduces_each:
            if is_final and bucket.is_final:
                self._start_in_order()
        elif bucket.is_full:
            self._start(bucket)

    def _start_in_order(self) -> None:
        """Starts every bucket whose turn it is: the order must be the same on all ranks."""
        while self._next < len(self._in_turn) and self._in_turn[self._next].is_final:
            self._start(self._in_turn[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        bucket.start_reduce()
        if bucket.sharding.divides_gradients:
            self._travelling.append(bucket)
            while len(self._travelling) > 1:
                self._travelling.pop(0).finish_scatter()


# ---- from slots to buckets ---------------------------------------------------------------------


def _by_size(
    slots: Sequence[Slot], capacity: int, together: Callable[[Slot], Hashable]
) -> list[list[Slot]]:
    """Buckets of about `capacity` elements."""
    kinds: dict[Hashable, list[list[Slot]]] = {}
    for slot in slots:
        groups = kinds.setdefault(_kind(slot), [[]])
        last = groups[-1]
        is_full = sum(s.elements for s in last) + slot.elements > capacity
        leaves = bool(last) and together(last[-1]) != together(slot)
        if last and (leaves or (is_full and together(slot) is None)):
            groups.append([])
        groups[-1].append(slot)
    return [group for groups in kinds.values() for group in groups if group]


def _room(slots: Sequence[Slot], shards: int) -> int:
    """Elements of a bucket that can be dealt to shards whole, with at most a quarter of padding."""
    return 4 * shards * max((slot.elements for slot in slots), default=0)


def _alone(_: Slot) -> None:
    return None


def _by_unit(slots: Sequence[Slot], unit_of: Callable[[Slot], Hashable]) -> list[list[Slot]]:
    """Buckets that are gathered together: those of a unit, one for each kind of reduction."""
    units: dict[Hashable, list[Slot]] = {}
    for slot in slots:
        units.setdefault((unit_of(slot), _kind(slot)), []).append(slot)
    return list(units.values())


def _kind(slot: Slot) -> Hashable:
    """Slots of one bucket are complete together and partial over the same axis, or all frozen."""
    if not slot.trains:
        return False
    return slot.stage is None, slot.before and id(slot.before)


def _as_completed(slots: Sequence[Slot], groups: Iterable[list[Slot]]) -> list[list[Slot]]:
    """Groups by their last slot; those whose gradients are complete only in the end come last."""
    place = {id(slot): index for index, slot in enumerate(slots)}
    return sorted(
        groups,
        key=lambda group: (group[0].stage is None, place[id(group[-1])]),
    )
