"""What a run says about itself before its first step: layers and parameters of each stage, dtypes.

The counts are of the tensors that were really built, and must add up to the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triptych.errors import RunError
from triptych.model.count import parameters
from triptych.model.model import Model
from triptych.plan.families import family_of
from triptych.plan.plan import Plan
from triptych.plan.ranks import placement, stages_of_rank
from triptych.runtime.engine import Engine
from triptych.train.memory import gathered
from triptych.units import format_count


@dataclass(frozen=True, slots=True)
class Built:
    """What one rank has built: elements that it counts for the whole model, those of them that are
    frozen, and dtypes by kind.
    """

    stage: int
    elements: int
    frozen: int
    dtypes: Mapping[str, str]


def built(engine: Engine) -> Built:
    """What a rank has built."""
    is_buffer = family_of(engine.model.family).is_buffer
    saved = [s for s in engine.shards() if s.kind == "weight" and s.saved]
    weights = [shard for shard in saved if not is_buffer(shard.name)]
    elements = sum(shard.tensor.numel() for shard in weights)
    frozen = sum(shard.tensor.numel() for shard in weights if shard.name in engine.frozen)
    return Built(engine.mesh.coordinates.pp, elements, frozen, engine.dtypes())


def startup_lines(plan: Plan, model: Model, ranks: Sequence[Built]) -> list[str]:
    """The lines to show. Raises RunError if the parameters built are not the model's."""
    counts = [sum(rank.elements for rank in ranks if rank.stage == i) for i in range(plan.pp)]
    total = parameters(model)
    if sum(counts) != total:
        raise RunError(
            f"{sum(counts)} parameters were built, but the model has {total}: {counts} by stage"
        )
    who = "stage" if plan.chunks == 1 else "pipeline rank"
    lines = [
        f"{who} {index}: {_layers(plan, index)}, {format_count(count)} parameters ({count})"
        for index, count in enumerate(counts)
    ]
    lines.append(
        f"all stages: {plan.num_layers} layers, {format_count(total)} parameters ({total})"
    )
    if model.tied and placement(plan)[0] != placement(plan)[-1]:
        lines.append("the last stage shares the embedding of stage 0; it counts there")
    frozen = sum(rank.frozen for rank in ranks)
    if frozen:
        lines.append(f"frozen: {format_count(frozen)} of them ({frozen})")
    return [*lines, *_dtype_lines(ranks)]


def _layers(plan: Plan, pp_index: int) -> str:
    """The layers of a pipeline rank: `layers 0-3`, with several stages `layers 0-1, 6-7`."""
    stages = [plan.stages[index] for index in stages_of_rank(plan, pp_index)]
    if len(stages) == 1 and stages[0].num_layers == 1:
        return f"layer {stages[0].start}"
    spans = (str(s.start) if s.num_layers == 1 else f"{s.start}-{s.stop - 1}" for s in stages)
    return "layers " + ", ".join(spans)


_NARROW = ("bf16", "fp16")


def _dtype_lines(ranks: Sequence[Built]) -> Iterator[str]:
    """The dtypes of live tensors, of each rank if they differ, and what to think of them."""
    words = [", ".join(f"{kind} {dtype}" for kind, dtype in r.dtypes.items()) for r in ranks]
    yield f"dtypes: {words[0]}"
    for rank, word in enumerate(words):
        if word != words[0]:
            yield f"warning: rank {rank} has other dtypes: {word}"
    narrow = [kind for kind in ("master", "moments") if ranks[0].dtypes[kind] in _NARROW]
    if narrow:
        yield (
            f"warning: {' and '.join(narrow)} in {ranks[0].dtypes[narrow[0]]}: updates below its "
            "rounding are lost, which shows as a higher loss; "
            f"{', '.join(f'precision.{kind} = fp32' for kind in narrow)} keeps them"
        )


def show_startup(plan: Plan, model: Model, mine: Built) -> list[str]:
    """As `startup_lines`, from all ranks; collective."""
    return startup_lines(plan, model, gathered(mine))
