"""What stages of one plan have in common, and what each may have of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from triptych.cost.setting import Setting
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan, Stage
from triptych.search.pins import Pins
from triptych.search.space import SMALL_MICROBATCH, Space


class Round(NamedTuple):
    """Settings that all stages share; `rows` are the sequences of a micro-batch over all ranks."""

    rows: int
    recompute: str
    every: int
    sequence_parallel: bool


class Place(NamedTuple):
    """A submesh in one group of nodes, and the degrees of a stage on it."""

    group: int
    data: int
    tensor: int
    context: int
    expert: int

    @property
    def num_devices(self) -> int:
        """Devices of the submesh."""
        return self.data * self.tensor * self.context

    def stage(self, start: int, stop: int) -> Stage:
        """A stage of some layers here."""
        return Stage(
            start=start,
            stop=stop,
            data=self.data,
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
        )


UNSUPPORTED = ("pp", "layers", "chunks", "hybrid_shard", "accumulation", "offload")
"""Settings whose pins leave stages nothing to find."""


def rounds(space: Space) -> Iterator[Round]:
    """All shared settings but ZeRO's."""
    batch = space.workload.global_batch
    for rows in divisors(batch):
        if rows > SMALL_MICROBATCH and rows & (rows - 1):
            continue
        for recompute, every in space.recomputes():
            for is_parallel in space.pins.choices("sequence_parallel", (False, True)):
                yield Round(rows, recompute, every, is_parallel)


def submesh_sizes(nodes: int, per_node: int) -> list[int]:
    """Devices of submeshes that always tile a group of nodes: parts of a node, whole nodes.

    Parts are powers of two where nodes are; otherwise every divisor of a node, of which larger ones
    are multiples. Source: Zheng et al. 2022, "Alpa", sec. 5.2 and app. A.
    """
    is_power = per_node & (per_node - 1) == 0
    inside = [n for n in divisors(per_node) if is_power or n in (1, per_node)]
    return inside + [per_node * count for count in range(2, nodes + 1)]


def places(space: Space, group_index: int) -> Iterator[Place]:
    """Every submesh of a group with every set of degrees on it."""
    group = space.cluster.groups[group_index]
    pins = space.pins
    for size in submesh_sizes(group.nodes, group.devices_per_node):
        for tensor in divisors(size):
            is_inside = tensor <= group.devices_per_node or space.across_nodes
            if not is_inside or tensor not in space.usable_tensor:
                continue
            for context in space.contexts(divisors(size // tensor)):
                data, rest = divmod(size, tensor * context)
                if rest or tensor not in pins.choices("tp", (tensor,)):
                    continue
                if data not in pins.choices("dp", (data,)):
                    continue
                for expert in space.experts():
                    if (data * context) % expert == 0:
                        yield Place(group_index, data, tensor, context, expert)


def base_plan(space: Space, shared: Round, zero: int) -> Plan:
    """A plan with the shared settings; stages and micro-batch are to come."""
    return space.base.with_(
        recompute=shared.recompute,
        recompute_every=shared.every,
        sequence_parallel=shared.sequence_parallel,
        zero=zero,
        compile=space.compiles(1),
    )


def suits(space: Space, place: Place, shared: Round) -> bool:
    """True if the rows of a micro-batch divide over a place's ranks, and so do sequences."""
    parts = place.context * (place.tensor if shared.sequence_parallel else 1)
    return shared.rows % place.data == 0 and space.workload.sequence_length % parts == 0


def setting(space: Space, place: Place, shared: Round) -> Setting:
    """The setting of a stage at a place."""
    plan = base_plan(space, shared, 0).with_(
        stages=(place.stage(0, space.model.num_layers),), microbatch=shared.rows // place.data
    )
    return Setting.of(plan)


def unsupported(pins: Pins) -> list[str]:
    """Pins that a search for stages of their own cannot keep."""
    return [name for name in UNSUPPORTED if name in pins.values]
