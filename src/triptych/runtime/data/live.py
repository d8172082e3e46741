"""Bytes of the live tensors that hold a model's state on this rank, by term."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.optimizer import ShardedAdamW
from triptych.runtime.data.pieces import pieces_of


class LiveBytes(NamedTuple):
    """Bytes that have memory now.

    `gathered` are whole values of units that are divided, `travelling` whole gradients on their
    way into shards: what does not shrink with more data ranks. `offloaded` is in host memory.
    `padding` is contained in the first three.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    travelling: int
    offloaded: int
    padding: int


def live_bytes(buckets: GradientBuckets, optimizer: ShardedAdamW) -> LiveBytes:
    """What this rank holds at this moment."""
    gathered = _bytes(b.values for b in buckets.buckets if b.sharding.divides_values)
    travelling = _bytes(b.gradients for b in buckets.buckets if b.sharding.divides_gradients)
    state = _bytes(tensor for kept in optimizer.states for tensor in kept.kept.values())
    kept_values = _bytes(bucket.shard_values for bucket in buckets.buckets)
    kept_gradients = _bytes(bucket.shard_gradients for bucket in buckets.buckets)
    return LiveBytes(
        parameters=kept_values,
        gradients=kept_gradients,
        optimizer=0 if optimizer.is_offloaded else state,
        gathered=gathered,
        travelling=travelling,
        offloaded=state if optimizer.is_offloaded else 0,
        padding=_padding(buckets, optimizer),
    )


def live_dtypes(buckets: GradientBuckets, optimizer: ShardedAdamW) -> dict[str, torch.dtype]:
    """The dtypes of live tensors: what is stored, computes, travels and is updated."""
    bucket = buckets.buckets[0]
    module, name = bucket.slots[0].places[0]
    found = {"parameter": bucket.shard_values.dtype, "compute": getattr(module, name).dtype}
    for state in optimizer.states[:1]:  # a rank whose parameters are frozen has none
        gradients = state.bucket.shard_gradients
        found |= {
            "gradient": gradients.dtype,
            "reduction": state.bucket.packed(gradients[:0]).dtype,
            "master": state.kept.get("master", bucket.shard_values).dtype,
            "moments": state.kept["exp_avg"].dtype,
        }
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The memory behind tensors, of views too: each storage counts once."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
    by_address = {s.data_ptr(): s.nbytes() for s in storages.values()}
    return sum(by_address.values())


def _padding(buckets: GradientBuckets, optimizer: ShardedAdamW) -> int:
    """Bytes between and behind the slots of what is kept: values, gradients, optimizer state."""
    total = 0
    kept = {id(state.bucket): state.kept.values() for state in optimizer.states}
    for bucket in buckets.buckets:
        own = sum(piece.stop - piece.start for piece in pieces_of(bucket))
        whole = sum(slot.elements for slot in bucket.slots)
        shard_gap = bucket.stop - bucket.start - own
        gap = bucket.elements - whole
        sharding = bucket.sharding
        total += (shard_gap if sharding.divides_values else gap) * bucket.values.itemsize
        if bucket.trains:
            total += (shard_gap if sharding.divides_gradients else gap) * bucket.gradients.itemsize
        if not optimizer.is_offloaded:
            total += shard_gap * sum(tensor.itemsize for tensor in kept.get(id(bucket), ()))
    return total
