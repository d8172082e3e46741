"""What a run says about itself before its first step: layers and parameters of each stage, dtypes.

The counts are of the tensors that were really built, and must add up to the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from triptych.errors import RunError
from triptych.model.count import parameters
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.ranks import placement, stages_of_rank
from triptych.runtime.shard import Shard
from triptych.train.memory import gathered
from triptych.units import format_count


@dataclass(frozen=True, slots=True)
class Built:
    """What one rank has built: elements that it counts for the whole model, and dtypes by kind."""

    stage: int
    elements: int
    dtypes: Mapping[str, str]


def built(shards: Iterable[Shard], stage: int, gradient: str) -> Built:
    """What a rank's shards and the dtype of its gradients amount to."""
    elements = 0
    dtypes = {"gradient": gradient}
    for shard in shards:
        dtypes[shard.kind] = str(shard.tensor.dtype).removeprefix("torch.")
        if shard.kind == "weight" and shard.saved:
            elements += shard.tensor.numel()
    return Built(stage, elements, dtypes)


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
    lines.append(f"dtypes: {_dtypes(plan, ranks[0].dtypes)}")
    return lines


def _layers(plan: Plan, pp_index: int) -> str:
    """The layers of a pipeline rank: `layers 0-3`, with several stages `layers 0-1, 6-7`."""
    stages = [plan.stages[index] for index in stages_of_rank(plan, pp_index)]
    if len(stages) == 1 and stages[0].num_layers == 1:
        return f"layer {stages[0].start}"
    spans = (str(s.start) if s.num_layers == 1 else f"{s.start}-{s.stop - 1}" for s in stages)
    return "layers " + ", ".join(spans)


def _dtypes(plan: Plan, found: Mapping[str, str]) -> str:
    """The dtypes of live tensors; reduction runs in the gradient's buffers."""
    weight = found.get("weight", "none")
    words = {
        "parameter": weight,
        "compute": weight,
        "gradient": found["gradient"],
        "reduction": found["gradient"],
        "master": found.get("master", f"{weight} (the parameter itself)"),
        "moments": found.get("exp_avg", "none"),
    }
    return ", ".join(f"{name} {dtype}" for name, dtype in words.items())


def show_startup(plan: Plan, model: Model, mine: Built) -> list[str]:
    """As `startup_lines`, from all ranks; collective."""
    return startup_lines(plan, model, gathered(mine))
