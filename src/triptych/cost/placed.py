"""Where each stage runs on a mixed cluster: it is priced on the nodes of its own ranks."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cluster.cluster import Cluster
from triptych.cost.pricer import Pricer
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
