"""Bytes that a rank sends in one step, by axis; what the runtime's counters show.

Ring-optimal: an all-reduce of S sends 2 (n-1)/n S, a gather or scatter (n-1)/n S, a message S.
"""

from __future__ import annotations

from typing import NamedTuple

from triptych.cost.context import context_bytes
from triptych.cost.exchange import (
    HALVES,
    count_bytes,
    dispatch_bytes,
    entries,
    gathers_again,
    halves_bytes,
    norm_sum_bytes,
    regions,
)
from triptych.cost.frame import Frame
from triptych.cost.gathers import Gathered, gathered
from triptych.cost.holdings import Holdings
from triptych.cost.kernels.collectives import all_reduce_bytes, gather_bytes
from triptych.cost.recompute import regathers, repeated_halves
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator, copies_of
from triptych.cost.site import Site
from triptych.cost.storage import Storage
from triptych.cost.sync import late_elements
from triptych.model.model import Block


class Traffic(NamedTuple):
    """Bytes sent by axis; `tie` is the exchange of a tied table between first and last stage."""

    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    tie: float = 0.0

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        """The sum with `times` another."""
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))

    def largest(self, other: Traffic) -> Traffic:
        """The larger of each axis."""
        return Traffic(*map(max, self, other))


def layer_traffic(
    site: Site, block: Block, local: tuple[LocalOperator, ...], setting: Setting
) -> Traffic:
    """Bytes of one layer for one micro-batch, forward and backward."""
    passes = 3 if setting.recompute == "full" else 2
    forwards = 1 if setting.recompute == "none" else 2
    halves = 2 * HALVES * regions(block) + repeated_halves(site, block, setting)
    halves += regathers(setting)
    if gathers_again(site.software, setting):
        halves += len(entries(site, block, local, setting))
    forward, backward = (context_bytes(site, local, setting, is_forward=x) for x in (True, False))
    dispatched = gather_bytes(setting.expert, dispatch_bytes(site, block, setting))
    sums = all_reduce_bytes(setting.tensor, norm_sum_bytes(site, local, setting))
    return Traffic(
        tensor=halves_bytes(site, setting, halves) + passes * sums,
        context=forwards * forward + backward,
        expert=passes * 2 * dispatched
        + (passes - 1) * gather_bytes(setting.expert, count_bytes(block)),
    )


def embedding_traffic(site: Site, setting: Setting) -> Traffic:
    """One all-reduce of the hidden states, or a reduce-scatter and its backward's all-gather."""
    return Traffic(tensor=all_reduce_bytes(setting.tensor, site.activation_bytes(setting)))


def head_traffic(site: Site, setting: Setting) -> Traffic:
    """One all-reduce of the hidden states' gradient, or gather and scatter; three fp32 a token."""
    tokens = site.tokens(setting)
    hidden = all_reduce_bytes(setting.tensor, site.activation_bytes(setting))
    return Traffic(tensor=hidden + all_reduce_bytes(setting.tensor, 12.0 * tokens))


def step_traffic(
    held: Holdings,
    storage: Storage,
    *,
    tensor: int,
    copies: int,
    data: int,
    expert_data: int,
    sequence_parallel: bool,
    num_microbatches: int,
    refetched: Gathered,
) -> Traffic:
    """Bytes of a step's gradients and parameters, and of late sums (of shards)."""
    late_bytes = storage.reduction_bytes / storage.divisor
    late = all_reduce_bytes(tensor, late_elements(held, sequence_parallel) * late_bytes)
    late += all_reduce_bytes(copies, held.copied * late_bytes)
    shards, expert_shards = storage.divisor, storage.expert_shards if storage.zero else 1
    return Traffic(
        tensor=late,
        data=_data_bytes(held.dense, refetched.dense, storage, shards, data, num_microbatches)
        + _data_bytes(
            held.expert, refetched.expert, storage, expert_shards, expert_data, num_microbatches
        ),
        tie=all_reduce_bytes(2, held.tied * late_bytes),
    )


def _data_bytes(
    elements: float,
    refetched: float,
    storage: Storage,
    shards: int,
    ranks: int,
    num_microbatches: int,
) -> float:
    """Gradients to their shards and over the shards' replicas; updated or divided parameters.

    `refetched` are the elements that ZeRO-3 gathers in a step.
    """
    rounds = num_microbatches if storage.reduces_each else 1
    reduced_bytes = rounds * gather_bytes(shards, elements * storage.reduction_bytes)
    summed = elements * storage.reduction_bytes / shards
    spread = refetched if storage.zero >= 3 else elements
    return (
        reduced_bytes
        + all_reduce_bytes(max(1, ranks // shards), summed)
        + gather_bytes(shards, spread * storage.parameter_bytes)
    )


def frame_traffic(frame: Frame, storage: Storage, schedule: str = "1f1b") -> Traffic:
    """The most that any rank sends in a step, axis by axis."""
    most = Traffic()
    for rank in range(frame.num_ranks):
        most = most.largest(rank_traffic(frame, storage, rank, schedule))
    return most


def rank_traffic(frame: Frame, storage: Storage, rank: int, schedule: str = "1f1b") -> Traffic:
    """What a pipeline rank sends in a step."""
    total = Traffic()
    for index in frame.stages_of(rank):
        total = total.plus(_stage_traffic(frame, index), frame.num_microbatches)
        total = total.plus(_step_traffic(frame, storage, schedule, index, rank))
    for hop in frame.hops:
        count, tensor = frame.num_microbatches, frame.stages[hop.target].tensor
        if frame.placement[hop.source] == rank:
            total = total.plus(Traffic(pipeline=hop.sent_bytes), count)
        if frame.placement[hop.target] == rank:
            total = total.plus(Traffic(tensor=gather_bytes(tensor, hop.gathered_bytes)), count)
    return total


def _stage_traffic(frame: Frame, index: int) -> Traffic:
    """Bytes of one micro-batch on one stage, messages to other stages left out."""
    pricer, setting = frame.pricer, frame.settings[index]
    site, stage = pricer.site(setting), frame.stages[index]
    total = Traffic()
    counts = pricer.counts(stage.start, stage.stop, setting.recompute_every)
    for kind, own, count in pricer.layers(counts, setting):
        local = pricer.local(kind, own)
        total = total.plus(layer_traffic(site, pricer.kinds[kind], local, own), count)
    total = total.plus(embedding_traffic(site, setting)) if index == 0 else total
    is_last = index == len(frame.stages) - 1
    return total.plus(head_traffic(site, setting)) if is_last else total


def _step_traffic(frame: Frame, storage: Storage, schedule: str, index: int, rank: int) -> Traffic:
    stage, setting = frame.stages[index], frame.settings[index]
    storage, refetched = frame.storage(storage, index), Gathered()
    if storage.zero >= 3 and storage.shards > 1:
        refetched = gathered(frame, storage, schedule, index, rank)
    ranks = stage.data * stage.context
    traffic = step_traffic(
        frame.costs[index].holdings,
        storage,
        tensor=stage.tensor,
        copies=max(copies_of(block, stage.tensor) for block in frame.pricer.kinds),
        data=ranks,
        expert_data=max(1, ranks // stage.expert),
        sequence_parallel=setting.sequence_parallel,
        num_microbatches=frame.num_microbatches,
        refetched=refetched,
    )
    return traffic._replace(tie=_tie_bytes(frame, storage, index)) if traffic.tie else traffic


def _tie_bytes(frame: Frame, storage: Storage, index: int) -> float:
    """What a rank of one end of a tied model sends of its table's gradients: on average, what the
    ranks of the other end hold, over the ranks of its own.
    """
    other = len(frame.stages) - 1 - index
    asking, asked = frame.stages[other], frame.stages[index]
    held = frame.costs[other].holdings.tied / frame.storage(storage, other).divisor
    return held * storage.reduction_bytes * asking.num_devices / asked.num_devices
