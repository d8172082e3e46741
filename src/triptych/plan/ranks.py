"""Rank <-> coordinates of a uniform plan, and the groups of each axis.

Order `tp-cp-ep-dp-pp`: the leftmost axis varies fastest, so TP neighbours share a node
(Megatron-LM parallel_state.py; domain.md section 8). Expert parallelism lives inside dp x cp.
"""

from __future__ import annotations

from typing import NamedTuple

from triptych.plan.plan import Plan
from triptych.schedule.traits import TRAITS


class Coordinates(NamedTuple):
    """Where a rank sits on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """The coordinates of a global rank."""
    rest, tp = divmod(rank, plan.tp)
    rest, cp = divmod(rest, plan.cp)
    pp, dp = divmod(rest, plan.dp)
    return Coordinates(tp, cp, dp, pp)


def rank_of(plan: Plan, at: Coordinates) -> int:
    """The global rank at some coordinates."""
    return at.tp + plan.tp * (at.cp + plan.cp * (at.dp + plan.dp * at.pp))


def placement(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of each stage, by the plan's schedule."""
    return TRAITS[plan.schedule].ranks_of_stages(plan.pp, plan.chunks)


def stages_of_rank(plan: Plan, pp_index: int) -> tuple[int, ...]:
    """The stages that a pipeline rank runs, in model order."""
    return tuple(stage for stage, owner in enumerate(placement(plan)) if owner == pp_index)


def axis_groups(plan: Plan, axis: str) -> list[tuple[int, ...]]:
    """All groups of ranks that differ along `axis` only, each in axis order.

    `axis` is one of tp, cp, dp, pp, or several joined by `-` (`tp-pp`: the model group).
    """
    axes = axis.split("-")
    groups: dict[Coordinates, list[int]] = {}
    for rank in range(plan.world_size):
        at = coordinates(plan, rank)
        key = at._replace(**dict.fromkeys(axes, 0))
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
