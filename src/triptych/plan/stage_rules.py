"""Which stages are legal: their layers, their chunks on one rank, their devices, their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from triptych.errors import Problem
from triptych.plan.nearby import Asked, divisors, listed, nearest_multiples
from triptych.plan.plan import Stage, even_split
from triptych.plan.ranks import placement
from triptych.schedule.traits import TRAITS, chunks_problem


def _layers(asked: Asked) -> Iterator[Problem]:
    plan, model = asked.plan, asked.model
    bounds = [(stage.start, stage.stop) for stage in plan.stages]
    edges = [0, *(stop for _, stop in bounds)]
    follows = all(start == edge for (start, _), edge in zip(bounds, edges, strict=False))
    if follows and edges[-1] == model.num_layers and min(n.num_layers for n in plan.stages) > 0:
        return
    stages = len(plan.stages)
    if stages > model.num_layers:
        remedy = f"pp x chunks in {listed(range(1, model.num_layers + 1))}"
    else:
        remedy = "layers=" + "+".join(map(str, even_split(model.num_layers, stages)))
    yield Problem(
        f"the {stages} stages hold layers {', '.join(f'{a}..{b}' for a, b in bounds)} "
        f"({plan.num_layers} together); {model.name} has {model.num_layers} layers",
        "stages follow one another from layer 0, none is empty, and no layer is left out",
        remedy,
    )


def _chunks(asked: Asked) -> Iterator[Problem]:
    plan = asked.plan
    is_known = plan.schedule in TRAITS  # `setting_problems` says so otherwise
    wrong_chunks = chunks_problem(plan.schedule, plan.chunks) if is_known else None
    if wrong_chunks:
        yield wrong_chunks
    if len(plan.stages) % plan.chunks:
        yield Problem(
            f"{len(plan.stages)} stages with chunks={plan.chunks}",
            "stages = pipeline ranks x chunks",
            "chunks in " + listed(divisors(len(plan.stages))),
        )
        return
    if not is_known or wrong_chunks:
        return
    first: dict[int, int] = {}
    for index, rank in enumerate(placement(plan)):
        other = first.setdefault(rank, index)
        if _place(plan.stages[index]) != _place(plan.stages[other]):
            yield Problem(
                f"stage {index} has other degrees or devices than stage {other}, but the same "
                "ranks run both",
                "the chunks of one pipeline rank have the same degrees and devices",
                f"data={plan.stages[other].data}, tensor={plan.stages[other].tensor} for both",
            )


def _place(stage: Stage) -> tuple[object, ...]:
    return stage.data, stage.tensor, stage.context, stage.expert, stage.devices


def _devices(asked: Asked) -> Iterator[Problem]:
    plan = asked.plan
    given = [stage.devices for stage in plan.stages[: plan.pp]]
    if not any(given):
        return
    ranks = [rank for devices in given for rank in devices]
    fits = all(len(d) == s.num_devices for d, s in zip(given, plan.stages, strict=False))
    if fits and any(list(devices) != sorted(devices) for devices in given):
        order = " and ".join(str(sorted(devices)) for devices in given)
        yield Problem(
            f"the stages list devices {', '.join(map(str, given))}",
            "a stage lists its devices in ascending order, tensor neighbours first",
            f"devices = {order}",
        )
    if not fits or sorted(ranks) != list(range(plan.world_size)):
        yield Problem(
            f"the stages list devices {', '.join(map(str, given))} for {plan.world_size} ranks",
            "if devices are listed, each stage lists data x tensor x context of them and each "
            f"of ranks 0..{plan.world_size - 1} is in one stage",
            "no `devices` at all: they then follow the rank order",
        )


def _rows(asked: Asked) -> Iterator[Problem]:
    """Every stage divides the same micro-batches among its own data ranks."""
    plan = asked.plan
    uneven = [i for i, stage in enumerate(plan.stages) if plan.round_rows % stage.data]
    if not uneven:
        return
    common = math.lcm(*(stage.data for stage in plan.stages))
    unit = common // math.gcd(common, plan.dp)
    works = [f"microbatch={count}" for count in nearest_multiples(plan.microbatch, unit)]
    stages = ", ".join(f"data={plan.stages[i].data} of stage {i}" for i in uneven)
    yield Problem(
        f"a micro-batch has {plan.round_rows} sequences (microbatch={plan.microbatch} x "
        f"data={plan.dp} of stage 0); it does not divide over {stages}",
        "each stage divides the sequences of a micro-batch evenly over its data ranks",
        " or ".join(works),
    )


STAGE_RULES = (_layers, _chunks, _devices, _rows)
