"""What a step does once, after its micro-batches: reductions, the optimizer, gathers.

Gradients are reduced bucket by bucket behind the last micro-batch's backward. What that backward
does not cover, the last bucket and buckets that wait for a sum over another axis are exposed; on
CPUs everything in which communication itself needs the processor (`Group.free_share`).
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from triptych.cluster.measured import Curve
from triptych.cost.holdings import Holdings
from triptych.cost.kernels.collectives import Group
from triptych.cost.software import Software
from triptych.cost.storage import Storage

NORM_BYTES = 4.0
"""The gradient norm reads each gradient once."""

OVERLAP = 0.9
"""Share of a backward's seconds behind which a reduction makes progress at full rate."""


class Axes(NamedTuple):
    """The groups over which one stage synchronises."""

    data: Group  # gradients of dense parameters: data x context
    expert_data: Group  # of routed experts
    tensor: Group
    copies: Group  # tensor ranks with the same KV head
    tie: Group  # first and last stage, 2 ranks


class Tail(NamedTuple):
    """Exposed seconds of one stage at the end of a step."""

    reduce_s: float  # data axis, before the optimizer
    other_s: float  # sums over tensor ranks and the tie, before the optimizer
    optimizer_s: float
    gather_s: float  # updated parameters, after the optimizer

    @property
    def early_s(self) -> float:
        """What comes between the end of the pipeline and the optimizer."""
        return self.reduce_s + self.other_s


def step_tail(
    held: Holdings,
    storage: Storage,
    axes: Axes,
    *,
    last_backward_s: float,
    sequence_parallel: bool,
    memory_bytes_per_s: float,
    matrix_flops_per_s: float,
    software: Software,
    optimizer: Curve | None = None,
) -> Tail:
    """Exposed seconds of a stage's end of step; the last backward hides reductions.

    An `optimizer` that was measured does updates in fp32, the norm included. A program that hides
    nothing has no use for buckets: it sums all gradients at once.
    """
    if not software.hides_gradients:
        storage = storage._replace(bucket_bytes=sys.maxsize)
    reduction_bytes = storage.reduction_bytes
    owned = held.dense / (storage.shards if storage.zero else 1)
    owned += held.expert / (storage.expert_shards if storage.zero else 1)
    flops = held.matrix_flops / (storage.shards if storage.zero else 1)
    flops += held.expert_matrix_flops / (storage.expert_shards if storage.zero else 1)
    update = 0.0 if optimizer else software.optimizer_bytes + NORM_BYTES
    updated_s = optimizer.at(owned) if optimizer else 0.0
    if storage.parameter_bytes < 4:
        update += 4.0 + storage.parameter_bytes  # rounds the master into the parameter
    rate = software.scatter if storage.zero else software.exchange
    hidden_s = OVERLAP * last_backward_s if software.hides_gradients else 0.0
    reduce_s = _exposed_reduce_s(held, storage, axes, hidden_s * rate, reduction_bytes)
    return Tail(
        reduce_s=reduce_s / rate,
        other_s=_late_sums_s(held, axes, sequence_parallel, reduction_bytes / storage.divisor),
        optimizer_s=updated_s + owned * update / memory_bytes_per_s + flops / matrix_flops_per_s,
        gather_s=_gather_s(held, storage, axes) / rate,
    )


def late_elements(held: Holdings, sequence_parallel: bool) -> int:
    """Elements whose gradients are summed over all tensor ranks once a step."""
    return held.replicated if sequence_parallel else held.partial


def _exposed_reduce_s(
    held: Holdings, storage: Storage, axes: Axes, hidden_s: float, reduction_bytes: float
) -> float:
    if storage.reduces_each:
        return 0.0  # reduced inside each micro-batch's backward
    dense_s, last_s = _buckets_s(held.dense * reduction_bytes, storage, axes.data)
    expert_s, _ = _buckets_s(held.expert * reduction_bytes, storage, axes.expert_data)
    total_s = dense_s + expert_s
    tied_s, _ = _buckets_s(held.tied * reduction_bytes, storage, axes.data)
    hidden_s = min(hidden_s, axes.data.free_share * total_s)
    return max(last_s, tied_s, total_s - hidden_s)


def _buckets_s(size_bytes: float, storage: Storage, group: Group) -> tuple[float, float]:
    """Seconds of all buckets, and of one."""
    if group.size == 1 or size_bytes == 0:
        return 0.0, 0.0
    count = max(1, math.ceil(size_bytes / storage.bucket_bytes))
    each = size_bytes / count
    one_s = group.scatter_s(each) if storage.zero else group.all_reduce_s(each)
    return count * one_s, one_s


def _late_sums_s(
    held: Holdings, axes: Axes, sequence_parallel: bool, reduction_bytes: float
) -> float:
    late = late_elements(held, sequence_parallel)
    seconds = axes.tensor.all_reduce_s(late * reduction_bytes) if late else 0.0
    seconds += axes.copies.all_reduce_s(held.copied * reduction_bytes) if held.copied else 0.0
    return seconds + (axes.tie.all_reduce_s(held.tied * reduction_bytes) if held.tied else 0.0)


def _gather_s(held: Holdings, storage: Storage, axes: Axes) -> float:
    """ZeRO-1 and 2 gather updated parameters; ZeRO-3 gathers them when they are used."""
    if storage.zero not in (1, 2):
        return 0.0
    seconds = 0.0
    for elements, group in ((held.dense, axes.data), (held.expert, axes.expert_data)):
        size_bytes = elements * storage.parameter_bytes
        if group.size > 1 and size_bytes:
            count = max(1, math.ceil(elements * storage.gradient_bytes / storage.bucket_bytes))
            seconds += count * group.gather_s(size_bytes / count)
    return seconds
