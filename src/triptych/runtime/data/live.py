"""Bytes of the live tensors that hold a model's state on this rank, by term."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.optimizer import ShardedAdamW


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
    sharding = buckets.sharding
    values = _bytes(bucket.values for bucket in buckets.buckets)
    gradients = _bytes(bucket.gradients for bucket in buckets.buckets)
    state = _bytes(tensor for kept in optimizer.states for tensor in kept.kept.values())
    kept_values = _bytes(bucket.shard_values for bucket in buckets.buckets)
    kept_gradients = _bytes(bucket.shard_gradients for bucket in buckets.buckets)
    return LiveBytes(
        parameters=kept_values,
        gradients=kept_gradients,
        optimizer=0 if optimizer.is_offloaded else state,
        gathered=values if sharding.divides_values else 0,
        travelling=gradients if sharding.divides_gradients else 0,
        offloaded=state if optimizer.is_offloaded else 0,
        padding=_padding(buckets, optimizer),
    )


def live_dtypes(optimizer: ShardedAdamW) -> dict[str, torch.dtype]:
    """The dtypes of live tensors: what is stored, computes, travels and is updated."""
    state = optimizer.states[0]
    bucket = state.bucket
    module, name = bucket.slots[0].places[0]
    return {
        "parameter": bucket.shard_values.dtype,
        "compute": getattr(module, name).dtype,
        "gradient": bucket.shard_gradients.dtype,
        "reduction": bucket.packed(bucket.shard_gradients[:0]).dtype,
        "master": state.kept.get("master", bucket.shard_values).dtype,
        "moments": state.kept["exp_avg"].dtype,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The memory behind tensors, of views too: each storage counts once."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
    by_address = {s.data_ptr(): s.nbytes() for s in storages.values()}
    return sum(by_address.values())


def _padding(buckets: GradientBuckets, optimizer: ShardedAdamW) -> int:
    """Bytes between and behind the slots of what is kept: values, gradients, optimizer state."""
    total = 0
    for state in optimizer.states:
        bucket = state.bucket
        own = sum(piece.stop - piece.start for piece in state.pieces)
        whole = sum(slot.elements for slot in bucket.slots)
        shard_gap = bucket.stop - bucket.start - own
        gap = bucket.elements - whole
        sharding = buckets.sharding
        total += (shard_gap if sharding.divides_values else gap) * bucket.values.itemsize
        total += (shard_gap if sharding.divides_gradients else gap) * bucket.gradients.itemsize
        if not optimizer.is_offloaded:
            total += shard_gap * sum(tensor.itemsize for tensor in state.kept.values())
    return total
