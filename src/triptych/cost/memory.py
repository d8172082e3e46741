"""Bytes that one rank needs at its peak, by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.cost.pipeline import Moment
from triptych.cost.pricer import StageCost
from triptych.cost.software import TRIPTYCH, Footprint
from triptych.cost.storage import Storage
from triptych.units import GIB

CPU_OVERHEAD_BYTES = 0.42 * GIB
"""An interpreter with torch and transformers (341 MB), and what a first step adds (80 MB)."""


class Memory(NamedTuple):
    """Bytes by term."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: float

    @property
    def total_bytes(self) -> float:
        """The peak of the rank."""
        return sum(self)


def rank_memory(
    stages: Sequence[StageCost],
    moments: Sequence[Moment],
    storage: Storage,
    exchange_bytes: float,
    footprint: Footprint,
    is_cpu: bool,
) -> Memory:
    """Peak bytes of a rank that runs `stages`, at the worst of some moments.

    `exchange_bytes` are hidden states on their way: messages to other stages, gathered sequences.
    The peak is in a backward, or in the update where that needs more than activations.
    """
    weights, gradients, optimizer, buffers = state_bytes(stages, storage, footprint)
    activations, logits = work_bytes(stages, moments, footprint)
    update = footprint.update_bytes * owned_elements(stages, storage) * (storage.shards > 1)
    if update > activations + logits:
        activations, logits, buffers = 0.0, 0.0, buffers + update
    tensors = (weights, gradients, optimizer, activations, logits, buffers + exchange_bytes)
    return Memory(*tensors, overhead=sum(overhead_bytes(sum(tensors), footprint, is_cpu)))


def owned_elements(stages: Sequence[StageCost], storage: Storage) -> float:
    """Parameters whose optimizer state a rank holds."""
    dense = sum(stage.holdings.dense for stage in stages)
    expert = sum(stage.holdings.expert for stage in stages)
    return _owned(dense, expert, storage)


def _owned(dense: float, expert: float, storage: Storage) -> float:
    """Of elements that a rank holds, those that it updates."""
    if not storage.zero:
        return float(dense + expert)
    return dense / storage.shards + expert / storage.expert_shards


def state_bytes(
    stages: Sequence[StageCost], storage: Storage, footprint: Footprint = TRIPTYCH.footprint
) -> tuple[float, float, float, float]:
    """Weights, gradients, optimizer state and the buffers between them: what ZeRO divides."""
    dense = sum(stage.holdings.dense for stage in stages)
    expert = sum(stage.holdings.expert for stage in stages)
    held = float(dense + expert)
    own = dense / storage.shards + expert / storage.expert_shards
    weights, gradients, optimizer = kept_bytes(held, own, storage, footprint)
    if not storage.is_offloaded:
        optimizer -= storage.moment_bytes * _muon_elements(stages, storage)
    buffers = _gathered_bytes(stages, storage, held)
    if footprint.buckets:
        buffers = _buffer_bytes(stages, storage, held, footprint)
    elif footprint.stand_ins:
        buffers = max(stage.shapes for stage in stages) * storage.parameter_bytes
    if footprint.sums_apart and storage.shards > 1 and not storage.zero:
        buffers += held * storage.gradient_bytes
    return weights, gradients, optimizer, buffers


def kept_bytes(
    held: float, own: float, storage: Storage, footprint: Footprint = TRIPTYCH.footprint
) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of `held` parameters, if ZeRO's share is `own`."""
    zero = storage.zero
    optimizer = (own if zero >= 1 else held) * (storage.optimizer_bytes + footprint.owned_bytes)
    gradient_bytes = storage.gradient_bytes
    if footprint.narrow_gradients and gradient_bytes > storage.parameter_bytes:
        gradient_bytes += storage.parameter_bytes
    return (
        (own if zero >= 3 else held) * storage.parameter_bytes,
        (own if storage.reduces_each else held) * gradient_bytes,
        0.0 if storage.is_offloaded else optimizer,
    )


def _muon_elements(stages: Sequence[StageCost], storage: Storage) -> float:
    """Elements of matrices that have no second moment on a rank."""
    dense = sum(stage.holdings.matrices for stage in stages)
    expert = sum(stage.holdings.expert_matrices for stage in stages)
    return _owned(dense, expert, storage)


def work_bytes(
    stages: Sequence[StageCost],
    moments: Sequence[Moment],
    footprint: Footprint = TRIPTYCH.footprint,
) -> tuple[float, float]:
    """Activations, and logits with the head's gradient: what a schedule keeps alive at most.

    Logits are gone when the backward of a layer works.
    """
    working = max([stage.working_bytes for stage in stages])
    logits = max([stage.logits_bytes for stage in stages])
    activations, gradients = max([_alive_bytes(stages, moment) for moment in moments], key=sum)
    working = max(0.0, working - logits - gradients)
    return working + activations, logits + gradients


def _alive_bytes(stages: Sequence[StageCost], moment: Moment) -> tuple[float, float]:
    activations = gradients = 0.0
    for stage, alive in zip(stages, moment, strict=True):
        activations += stage.saved_bytes * alive.in_flight + stage.deferred_bytes * alive.deferred
        gradients += stage.head_gradient_bytes * alive.in_flight
    return activations, gradients


def overhead_bytes(tensor_bytes: float, footprint: Footprint, is_cpu: bool) -> tuple[float, float]:
    """What is there besides tensors: lost by the allocator, and the program's context."""
    if is_cpu:
        return 0.0, CPU_OVERHEAD_BYTES
    return footprint.fragmentation * tensor_bytes, footprint.context_bytes


def room_bytes(limit_bytes: float, footprint: Footprint, is_cpu: bool) -> float:
    """Bytes of tensors with which a peak is `limit_bytes`."""
    share, fixed = overhead_bytes(1.0, footprint, is_cpu)
    return (limit_bytes - fixed) / (1.0 + share)


def _gathered_bytes(stages: Sequence[StageCost], storage: Storage, held: float) -> float:
    """A unit of ZeRO-3 gathered and its gradients whole; otherwise a gradient on its way."""
    if storage.zero >= 3:
        unit = held / sum(stage.num_units for stage in stages)
        return unit * ((1 + storage.prefetch) * storage.parameter_bytes + storage.gradient_bytes)
    return max(stage.largest_weight for stage in stages) * storage.parameter_bytes


def _buffer_bytes(
    stages: Sequence[StageCost], storage: Storage, held: float, footprint: Footprint
) -> float:
    """A gradient on its way into its bucket, buckets under way, gathered units.

    Where gradients are divided two buckets have memory, one that fills and one that travels; a
    bucket of ZeRO-3 is a unit. Gradients that travel in another dtype are copies; whole ones travel
    all together. Gradients made in place need no way if they have the parameters' dtype, and only
    the other ranks' parts of buckets that are summed to shards arrive elsewhere.
    """
    unit = max(stage.largest_unit for stage in stages)
    buffers = max(stage.largest_weight for stage in stages) * storage.parameter_bytes
    if footprint.in_place and storage.parameter_bytes == storage.gradient_bytes:
        buffers = 0.0
    if storage.shards > 1 and footprint.in_place and storage.zero:
        bucket_bytes = unit * storage.gradient_bytes if storage.zero >= 3 else storage.bucket_bytes
        arriving = min(2 * bucket_bytes, held * storage.gradient_bytes)
        buffers += arriving * (storage.shards - 1) / storage.shards
    elif storage.shards > 1 and not footprint.in_place:
        buffers += min(2 * storage.bucket_bytes, held * storage.gradient_bytes)
    travelling = held
    if storage.reduces_each:
        bucket_bytes = unit * storage.gradient_bytes
        if storage.zero < 3:
            bucket_bytes = max(storage.bucket_bytes, bucket_bytes)
        travelling = min(2 * bucket_bytes / storage.gradient_bytes, held)
        buffers += travelling * storage.gradient_bytes
    if storage.converts:
        buffers += travelling * storage.reduction_bytes
    if storage.zero >= 3:
        buffers += (1 + storage.prefetch) * unit * storage.parameter_bytes
    return buffers
