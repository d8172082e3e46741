"""Do some LLMs fit a group of devices? From their configs, with the bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from triptych.cost.serving.layout import layout
from triptych.errors import InputError, Problem
from triptych.fleet.models import Shape
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.plan import even_split
from triptych.plan.serving import ServingPlan
from triptych.units import DTYPE_BYTES, GIB

CONFIG = "config.json"
BLOCK = 16
_DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Room(NamedTuple):
    """What a model takes of the fullest device of a group."""

    weights_bytes: int
    context_bytes: int  # keys and values of one request at its longest


def read_config(folder: Path) -> tuple[Model, str]:
    """The model of a folder and the dtype of its weights. Raises InputError if it has none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"cannot read {folder / CONFIG}: {error}"
        raise InputError(Problem(what, "a model's folder has its config")) from error
    word = config.get("dtype") or config.get("torch_dtype")
    return from_config(config, name=folder.name), _DTYPES.get(str(word), "fp32")


def room(folder: Path, shape: Shape, context: int | None) -> Room:
    """What a model takes on each device of a group. Raises InputError if it cannot be counted."""
    model, dtype = read_config(folder)
    plan = ServingPlan(
        layers=even_split(model.num_layers, shape.pipeline),
        tensor=shape.tensor,
        replicas=1,
        batch=1,
        chunk=1,
        weights=dtype,
        cache=dtype,
    )
    tokens = -(-min(context or model.max_position, model.max_position) // BLOCK) * BLOCK
    weights, cached = 0.0, 0.0
    for stage in layout(model, plan).stages:
        weights = max(weights, stage.weights_bytes)
        elements = sum(kind.cache_elements * kind.count for kind in stage.layers)
        cached = max(cached, elements * tokens * DTYPE_BYTES[dtype])
    return Room(int(weights), int(cached))


def crowded(
    group: str,
    shape: Shape,
    models: Sequence[tuple[str, Path, int | None]],
    memory_bytes: int,
) -> Problem | None:
    """Why models (name, folder, context) do not fit a group; None if they do.

    Beside all weights there must be room for one request of each model at its longest.
    """
    found = {name: room(folder, shape, context) for name, folder, context in models}
    needed = sum(sum(each) for each in found.values())
    if needed <= memory_bytes:
        return None
    parts = "; ".join(
        f"{name} {each.weights_bytes} + {each.context_bytes}" for name, each in found.items()
    )
    return Problem(
        f"{group}: {needed} bytes ({needed / GIB:.2f} GiB) on a device: {parts} (weights + keys "
        "and values of one request at its longest)",
        f"at most {memory_bytes} bytes ({memory_bytes / GIB:.2f} GiB)",
        "fewer models in the group, a larger shape, a shorter context",
    )
