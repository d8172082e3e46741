"""Host time: layers of a real engine whose arithmetic is next to nothing."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from triptych.measure.kernels import Found
from triptych.measure.watch import Row, Watch, in_rounds
from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine, MicroBatch
from triptych.runtime.mesh import Mesh

LAYER_KERNELS = 26.4
"""Kernels of a Llama layer, as the cost model counts them (11 operators, 2.4 kernels each)."""

FEW, MANY = 2, 8
MICROBATCHES, STEPS, TOKENS = 4, 6, 8

_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def host(watch: Watch) -> Found:
    """Kernels of a layer: seconds of a layer's forward and backward, over them."""
    engines = {layers: _engine(watch, layers) for layers in (FEW, MANY)}

    def measured(_: Row) -> Row:
        few, many = (_passes_s(engines[layers]) for layers in (FEW, MANY))
        each = [(b - a) / (MANY - FEW) / LAYER_KERNELS for a, b in zip(few, many, strict=True)]
        return [max(seconds, 1e-9) for seconds in each]

    return in_rounds([[LAYER_KERNELS]], measured)


def _engine(watch: Watch, layers: int) -> Engine:
    plan = Plan.uniform(layers, dp=watch.place.world, microbatch=1)
    return Engine.build(plan, {**_CONFIG, "num_hidden_layers": layers}, Mesh.create(plan))


def _passes_s(engine: Engine) -> tuple[float, float]:
    """Median seconds of a forward and of a backward; the last micro-batch's exchanges."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = [MicroBatch(ids, ids.clone())] * MICROBATCHES
    found: dict[str, list[float]] = {"F": [], "B": []}
    for _ in range(STEPS):
        engine.step(batch, 0.0)
        for span in engine.timeline().spans:
            for kind in found:
                if span.label in {f"0{kind}{i}" for i in range(MICROBATCHES - 1)}:
                    found[kind].append(span.end_s - span.start_s)
    return statistics.median(found["F"]), statistics.median(found["B"])
