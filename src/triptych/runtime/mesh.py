"""The ranks of a plan as a mesh, and this rank's communicators along its axes.

Axes: tensor (tp), data (dp), pipeline (pp). Beside them stand the groups that a step needs:

* `forward` and `backward`: for activations and their gradients, each to higher and (with several
  stages a rank) to lower pipeline ranks, so that no direction waits for another;
* `context` (cp): ranks that hold parts of the same sequences; they belong to the data axis too,
  as far as gradients are concerned;
* `tie`: first and last stage, which both hold a tied embedding;
* `copies`: tensor ranks that hold the same KV head when there are more ranks than KV heads;
* `shard` and `replicas`: the data axis in two, for ZeRO: ranks that divide one copy of the state,
  and ranks that hold the same part of it;
* `expert`: consecutive ranks of the data axis that hold different experts of a layer;
  `expert_shard` and `expert_replicas`: the ranks that hold the same ones, in two as above.

Stages may have degrees of their own: each of these groups is then made per stage, a message goes to
any rank of the next stage, and the tie joins all ranks of both ends.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from triptych.errors import PlanError
from triptych.plan.launch import launch_problem
from triptych.plan.plan import Plan
from triptych.plan.ranks import Coordinates, axis_groups, coordinates
from triptych.plan.transfer import pipeline_groups, tie_groups
from triptych.runtime.comm import Communicator, Counters
from triptych.runtime.strict import StrictCommunicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's place in a plan and its communicators."""

    plan: Plan
    rank: int
    coordinates: Coordinates
    device: torch.device
    counters: Counters
    tensor: Communicator
    context: Communicator
    data: Communicator
    shard: Communicator
    replicas: Communicator
    forward: tuple[Communicator, Communicator]
    backward: tuple[Communicator, Communicator]
    tie: Communicator
    copies: Communicator
    expert: Communicator
    expert_shard: Communicator
    expert_replicas: Communicator
    world: Communicator

    @classmethod
    def create(
        cls,
        plan: Plan,
        *,
        kv_heads: int | None = None,
        timeout_s: float = 600.0,
        strict: bool = False,
    ) -> Mesh:
        """Builds every process group of a plan; all ranks must call it at the same point.

        `kv_heads` is needed when the plan has more tensor ranks than the model has KV heads.
        Without an initialised process group the plan must have one rank. Raises PlanError if the
        launch has other ranks than the plan.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != plan.world_size:
            raise PlanError(launch_problem(plan, world, "SCRIPT"))
        maker = _GroupMaker(rank, timeout_s, Counters(), strict)
        data = maker.make("data", axis_groups(plan, "cp-dp"))
        shard, replicas = _sharing(maker, _data_groups(plan), data)
        expert_shard, expert_replicas = shard, replicas
        if any(stage.expert > 1 for stage in plan.stages):
            same = _same_experts(plan)
            whole = maker.make("data", [group for group, _ in same])
            expert_shard, expert_replicas = _sharing(maker, same, whole)
        return cls(
            plan=plan,
            rank=rank,
            coordinates=coordinates(plan, rank),
            device=local_device(),
            counters=maker.counters,
            tensor=maker.make("tensor", axis_groups(plan, "tp")),
            context=maker.make("context", axis_groups(plan, "cp")),
            data=data,
            shard=shard,
            replicas=replicas,
            forward=_both_ways(maker, plan),
            backward=_both_ways(maker, plan),
            tie=maker.make("tie", tie_groups(plan)),
            copies=maker.make("tensor", _copy_groups(plan, kv_heads)),
            expert=maker.make("expert", _expert_groups(plan)),
            expert_shard=expert_shard,
            expert_replicas=expert_replicas,
            world=maker.make("scalar", [range(world)]),
        )


_Groups = Sequence[tuple[Sequence[int], int]]


def _sharing(
    maker: _GroupMaker, groups: _Groups, whole: Communicator
) -> tuple[Communicator, Communicator]:
    """Ranks that divide one copy of the state among them, and ranks with the same part of it.

    `groups` hold the same parameters, and so many of each divide a copy; this rank's is `whole`.
    """
    alone = Communicator("data", (maker.rank,), 0, None, maker.counters)
    divided = [(group, size) for group, size in groups if 1 < size < len(group)]
    cuts = [cut for group, size in divided for cut in _cuts(group, size)]
    strides = [stride for group, size in divided for stride in _strides(group, size)]
    made = maker.make("data", cuts), maker.make("data", strides)
    size = next(size for group, size in groups if maker.rank in group)
    if size == whole.size:
        return whole, alone
    return (alone, whole) if size == 1 else made


def _data_groups(plan: Plan) -> _Groups:
    """Each group of the data axis, and how many of its ranks divide a copy of the state."""
    return [
        (group, plan.shards_of(plan.stages[coordinates(plan, group[0]).pp]))
        for group in axis_groups(plan, "cp-dp")
    ]


def _same_experts(plan: Plan) -> _Groups:
    """Each group of ranks with the same experts, and how many of them divide a copy."""
    found = []
    for group, size in _data_groups(plan):
        expert = _expert_degree(plan, group)
        found += [(same, max(1, size // expert)) for same in _strides(group, expert)]
    return found


def _expert_groups(plan: Plan) -> list[Sequence[int]]:
    """Consecutive ranks of the data axis that hold different experts."""
    groups = axis_groups(plan, "cp-dp")
    return [cut for group in groups for cut in _cuts(group, _expert_degree(plan, group))]


def _expert_degree(plan: Plan, group: Sequence[int]) -> int:
    return plan.stages[coordinates(plan, group[0]).pp].expert


def _cuts(group: Sequence[int], size: int) -> list[Sequence[int]]:
    """A group cut into groups of consecutive ranks."""
    return [group[at : at + size] for at in range(0, len(group), size)]


def _strides(group: Sequence[int], size: int) -> list[Sequence[int]]:
    """The ranks with the same place in such groups."""
    return [group[at::size] for at in range(size)]


def _both_ways(maker: _GroupMaker, plan: Plan) -> tuple[Communicator, Communicator]:
    """Along the pipeline to higher ranks and to lower ones; with one stage a rank they are one."""
    up = maker.make("pipeline", pipeline_groups(plan))
    return up, maker.make("pipeline", pipeline_groups(plan)) if plan.chunks > 1 else up


class _GroupMaker:
    """Makes the groups of one axis on all ranks, and this rank's communicator among them."""

    def __init__(self, rank: int, timeout_s: float, counters: Counters, strict: bool) -> None:
        self.rank = rank
        self.counters = counters
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._kind = StrictCommunicator if strict else Communicator

    def make(self, axis: str, groups: Sequence[Sequence[int]]) -> Communicator:
        mine: Communicator | None = None
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=self._timeout) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = self._kind(axis, ranks, ranks.index(self.rank), group, self.counters)
        if mine is None:  # the groups are those of other stages
            return Communicator(axis, (self.rank,), 0, None, self.counters)
        return mine


def _copy_groups(plan: Plan, kv_heads: int | None) -> list[tuple[int, ...]]:
    """Tensor ranks that share one KV head: consecutive ones of each tensor group."""
    groups = []
    for group in axis_groups(plan, "tp"):
        copies = len(group) // kv_heads if kv_heads and len(group) > kv_heads else 1
        groups += [group[start : start + copies] for start in range(0, len(group), copies)]
    return groups


def local_device() -> torch.device:
    """The device of this rank: its CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
