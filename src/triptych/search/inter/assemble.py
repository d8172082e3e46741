"""Stages on submeshes as a plan: which ranks each stage gets, and with which schedules it may run.

Submeshes of a group are dealt from the largest to the smallest, so that parts of a node never
straddle two (sizes are parts or multiples of a node). Where stages then follow one another in rank
order, a plan needs no list of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from triptych.plan.plan import Plan, Stage, even_split
from triptych.schedule.traits import TRAITS
from triptych.search.inter.rounds import Place, Round, base_plan
from triptych.search.space import AUTOMATIC_SIZE, CHUNKS, Space


def assembled(
    space: Space, shared: Round, zero: int, spans: Sequence[tuple[int, int, Place]]
) -> Plan:
    """The plan whose stages hold layers (start, stop) at places, under 1F1B."""
    devices = deal(space, [place for _, _, place in spans])
    stages = [place.stage(start, stop) for start, stop, place in spans]
    if [rank for ranks in devices for rank in ranks] != list(range(space.cluster.num_devices)):
        stages = [replace(s, devices=ranks) for s, ranks in zip(stages, devices, strict=True)]
    plan = base_plan(space, shared, zero)
    return plan.with_(
        stages=tuple(stages), chunks=1, microbatch=max(1, shared.rows // stages[0].data)
    )


def deal(space: Space, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The ranks of each submesh, ascending."""
    first = [0]
    for group in space.cluster.groups:
        first.append(first[-1] + group.num_devices)
    order = sorted(range(len(places)), key=lambda i: (-places[i].num_devices, i))
    found: dict[int, tuple[int, ...]] = {}
    for index in order:
        place = places[index]
        start = first[place.group]
        first[place.group] += place.num_devices
        found[index] = tuple(range(start, start + place.num_devices))
    return [found[index] for index in range(len(places))]


def scheduled(space: Space, plan: Plan) -> Iterator[Plan]:
    """A plan of one stage a rank under every schedule that has a program for it."""
    count = plan.num_microbatches(space.workload.global_batch)
    ranks = plan.pp
    tried = space.pins.choices("schedule", tuple(TRAITS))
    for chunks in CHUNKS:
        if min(stage.num_layers for stage in plan.stages) < chunks:
            return
        for name in tried:
            traits = TRAITS[name]
            is_small = ranks * count <= AUTOMATIC_SIZE
            if name == "zb-auto" and not is_small:
                continue
            if traits.allows(ranks, count, chunks) and (ranks > 1 or name == tried[0]):
                yield _chunked(plan, chunks, traits.is_v_shaped).with_(schedule=name)


def _chunked(plan: Plan, chunks: int, is_v_shaped: bool) -> Plan:
    """The same layers on the same ranks, in so many stages each."""
    if chunks == 1:
        return plan
    parts = [even_split(stage.num_layers, chunks) for stage in plan.stages]
    stages: list[Stage] = []
    start = 0
    for chunk in range(chunks):
        is_back = is_v_shaped and chunk % 2 == 1
        ranks = reversed(range(plan.pp)) if is_back else range(plan.pp)
        for rank in ranks:
            stop = start + parts[rank][chunk]
            stages.append(replace(plan.stages[rank], start=start, stop=stop))
            start = stop
    return plan.with_(stages=tuple(stages), chunks=chunks)
