"""Rank <-> coordinates of a plan, and the groups of each axis.

Order `tp-cp-ep-dp-pp`: the leftmost axis varies fastest, so TP neighbours share a node
(Megatron-LM parallel_state.py; domain.md section 8). Expert parallelism lives inside dp x cp.
Each pipeline rank has the degrees of its own stages, and the ranks that follow those of the
pipeline rank before it, or those that its stages list:

    data=1, tensor=2 | data=3, tensor=1        rank   0  1 | 2  3  4
                                               tp     0  1 | 0  0  0
                                               dp     0  0 | 0  1  2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.plan.plan import Plan
from triptych.schedule.traits import TRAITS


class Coordinates(NamedTuple):
    """Where a rank sits on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


def ranks_of(plan: Plan, pp_index: int) -> Sequence[int]:
    """The global ranks of a pipeline rank, tensor neighbours first."""
    stage = plan.stages[pp_index]
    if stage.devices:
        return stage.devices
    start = sum(other.num_devices for other in plan.stages[:pp_index])
    return range(start, start + stage.num_devices)


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """The coordinates of a global rank."""
    pp = next(index for index in range(plan.pp) if rank in ranks_of(plan, index))
    return coordinates_in(plan, pp, ranks_of(plan, pp).index(rank))


def coordinates_in(plan: Plan, pp_index: int, index: int) -> Coordinates:
    """The coordinates of the rank with an index among the ranks of a pipeline rank."""
    stage = plan.stages[pp_index]
    rest, tp = divmod(index, stage.tensor)
    dp, cp = divmod(rest, stage.context)
    return Coordinates(tp, cp, dp, pp_index)


def rank_of(plan: Plan, at: Coordinates) -> int:
    """The global rank at some coordinates."""
    stage = plan.stages[at.pp]
    index = at.tp + stage.tensor * (at.cp + stage.context * at.dp)
    return ranks_of(plan, at.pp)[index]


def placement(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of each stage, by the plan's schedule."""
    return TRAITS[plan.schedule].ranks_of_stages(plan.pp, plan.chunks)


def stages_of_rank(plan: Plan, pp_index: int) -> tuple[int, ...]:
    """The stages that a pipeline rank runs, in model order."""
    return tuple(stage for stage, owner in enumerate(placement(plan)) if owner == pp_index)


def axis_groups(plan: Plan, axis: str) -> list[tuple[int, ...]]:
    """All groups of ranks that differ along `axis` only, each in axis order.

    `axis` is one of tp, cp, dp, pp, or several joined by `-` (`cp-dp`: all that see other tokens).
    """
    axes = axis.split("-")
    groups: dict[Coordinates, list[int]] = {}
    for pp_index in range(plan.pp):
        for index, rank in enumerate(ranks_of(plan, pp_index)):
            at = coordinates_in(plan, pp_index, index)
            key = at._replace(**dict.fromkeys(axes, 0))
            groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
