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
from triptych.plan.ranks import Coordinates, axis_groups, coordinates, placement
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
        first, last = placement(plan)[0], placement(plan)[-1]
        ends = [(g[first], g[last]) if first != last else g[:1] for g in axis_groups(plan, "pp")]
        groups = axis_groups(plan, "cp-dp")
        data = maker.make("data", groups)
        shard, replicas = _sharing(maker, groups, data, plan.shards)
        expert_shard, expert_replicas = shard, replicas
        if plan.ep > 1:
            same = _strides(groups, plan.ep)
            size = max(1, plan.shards // plan.ep)
            expert_shard, expert_replicas = _sharing(maker, same, maker.make("data", same), size)
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
            tie=maker.make("tie", ends),
            copies=maker.make("tensor", _copy_groups(plan, kv_heads)),
            expert=maker.make("expert", _cuts(groups, plan.ep)),
            expert_shard=expert_shard,
            expert_replicas=expert_replicas,
            world=maker.make("scalar", [tuple(range(world))]),
        )


_Groups = Sequence[Sequence[int]]


def _sharing(
    maker: _GroupMaker, groups: _Groups, whole: Communicator, size: int
) -> tuple[Communicator, Communicator]:
    """Ranks that divide one copy of the state among them, and ranks with the same part of it.

    `groups` hold the same parameters, this rank's is `whole`; `size` of them divide a copy.
    """
    alone = Communicator("data", (maker.rank,), 0, None, maker.counters)
    if size == whole.size:
        return whole, alone
    if size == 1:
        return alone, whole
    return maker.make("data", _cuts(groups, size)), maker.make("data", _strides(groups, size))


def _cuts(groups: _Groups, size: int) -> _Groups:
    """Each group cut into groups of consecutive ranks."""
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]


def _strides(groups: _Groups, size: int) -> _Groups:
    """The ranks with the same place in such groups."""
    return [group[at::size] for group in groups for at in range(size)]


def _both_ways(maker: _GroupMaker, plan: Plan) -> tuple[Communicator, Communicator]:
    """Along the pipeline to higher ranks and to lower ones; with one stage a rank they are one."""
    up = maker.make("pipeline", axis_groups(plan, "pp"))
    return up, maker.make("pipeline", axis_groups(plan, "pp")) if plan.chunks > 1 else up


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
        if mine is None:  # an inner pipeline rank has no part in the tie
            return Communicator(axis, (self.rank,), 0, None, self.counters)
        return mine


def _copy_groups(plan: Plan, kv_heads: int | None) -> list[tuple[int, ...]]:
    """Tensor ranks that share one KV head: consecutive ones of each tensor group."""
    copies = plan.tp // kv_heads if kv_heads and plan.tp > kv_heads else 1
    return [
        group[start : start + copies]
        for group in axis_groups(plan, "tp")
        for start in range(0, plan.tp, copies)
    ]


def local_device() -> torch.device:
    """The device of this rank: its CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
