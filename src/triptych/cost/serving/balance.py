"""Layers of pipeline stages so that the slowest stage, head and sampling included, is as fast as
can be: the stage with the head gets fewer.

Kinds of layers are priced, not spans of them: a stage takes the sum of its layers. Source: Li et
al. 2023, "AlpaServe", sec. 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.layout import layer, layout
from triptych.cost.serving.step import Load, Stepper
from triptych.model.model import Model
from triptych.plan.serving import ServingPlan


def balanced_layers(
    model: Model, cluster: Cluster, plan: ServingPlan, engine: Engine, load: Load
) -> tuple[int, ...]:
    """Layers of each of the plan's stages, one at least, for the load of a step."""
    stepper = Stepper(layout(model, plan), cluster, plan, engine)
    known = {
        block: sum(stepper.layer(layer(model, block, plan), load)) for block in set(model.blocks)
    }
    seconds = [known[block] for block in model.blocks]
    return cut(seconds, stepper.head_s(load), plan.pp)


def cut(layers_s: Sequence[float], head_s: float, stages: int) -> tuple[int, ...]:
    """Contiguous parts with the least largest sum, the last part bearing `head_s` besides.

    Of several such cuts the one whose last parts are smallest.
    """
    low, high = max(layers_s, default=0.0), sum(layers_s) + head_s
    for _ in range(50):
        middle = (low + high) / 2.0
        if _parts(layers_s, head_s, stages, middle):
            high = middle
        else:
            low = middle
    parts = _parts(layers_s, head_s, stages, high)
    assert parts, "all layers in the time of all layers"
    return parts


def _parts(
    layers_s: Sequence[float], head_s: float, stages: int, most_s: float
) -> tuple[int, ...] | None:
    """Parts of at most `most_s`, or None; the first parts are filled first."""
    counts: list[int] = []
    position = 0
    for stage in range(stages):
        after = stages - stage - 1  # each needs a layer
        spent_s, count = head_s if after == 0 else 0.0, 0
        while position < len(layers_s) - after:
            if spent_s + layers_s[position] > most_s * (1.0 + 1e-9):
                break
            spent_s += layers_s[position]
            position, count = position + 1, count + 1
        if not count:
            return None
        counts.append(count)
    return tuple(counts) if position == len(layers_s) else None
