"""Where each stage runs on a mixed cluster: it is priced on the nodes of its own ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from triptych.cluster.cluster import Cluster
from triptych.cost.pricer import Pricer
from triptych.cost.shard import copies_of
from triptych.cost.sync import Axes
from triptych.plan.plan import Stage


def stage_pricers(
    pricer: Pricer, stages: Sequence[Stage], placement: Sequence[int]
) -> tuple[Pricer, ...]:
    """The pricer of each stage; of the whole cluster, if all its nodes are alike.

    `placement` is the pipeline rank of each stage. A stage on several groups waits for the slowest
    device among them.
    """
    if len(pricer.cluster.groups) == 1:
        return (pricer,) * len(stages)
    own, first = [], 0
    for stage in stages[: max(placement) + 1]:
        ranks = stage.devices or range(first, first + stage.num_devices)
        first += stage.num_devices
        own.append(pricer.on(frozenset(group_of(pricer.cluster, rank) for rank in ranks)))
    return tuple(own[rank] for rank in placement)


def group_of(cluster: Cluster, rank: int) -> int:
    """The group of nodes of a rank; the last one for ranks that the cluster does not have."""
    for index, group in enumerate(cluster.groups):
        if rank < group.num_devices:
            return index
        rank -= group.num_devices
    return len(cluster.groups) - 1


@lru_cache(maxsize=4096)
def placed(num_ranks: int, chunks: int, is_v_shaped: bool) -> tuple[int, ...]:
    """The pipeline rank of each stage: loops, or a V."""
    loop = tuple(range(num_ranks))
    return loop + loop[::-1] if is_v_shaped else loop * chunks


def axes_of(whole: Pricer, own: Pricer, stage: Stage, num_ranks: int) -> Axes:
    """The groups over which a stage on its own nodes synchronises; the tie is between ends."""
    ranks = stage.data * stage.context
    copies = max(copies_of(block, stage.tensor) for block in own.kinds)
    is_alone = num_ranks == 1
    return Axes(
        data=own.group(ranks, stage.tensor),
        expert_data=own.group(max(1, ranks // stage.expert), stage.tensor * stage.expert),
        tensor=own.group(stage.tensor, 1),
        copies=own.group(copies, 1),
        tie=own.group(1, 1) if is_alone else whole.group(2, (num_ranks - 1) * stage.num_devices),
    )
