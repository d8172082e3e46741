"""The logits of a model folder under a plan, as its ranks compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import STRICT, run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.mesh import Mesh
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.stage import InferenceStage

Logits = np.ndarray[Any, np.dtype[Any]]


def logits(folder: Path, plan: Plan, ids: list[int]) -> Logits:
    """The logits [V] after the last of some tokens; whole on every rank of the last stage."""
    answers = [found for found in run_ranks(plan.world_size, _logits, folder, plan, ids)]
    last = [answer for answer in answers if answer is not None]
    assert len(last) == plan.tp and all((answer == last[0]).all() for answer in last)
    return last[0]


def _logits(folder: Path, plan: Plan, ids: list[int]) -> Logits | None:
    source = ModelSource.open(folder)
    model = source.model()
    mesh = Mesh.create(plan, kv_heads=model.kv_heads, timeout_s=60, strict=STRICT)
    stage = InferenceStage(source.config, model, plan, mesh)
    source.load(stage.shards)
    with torch.inference_mode():
        found = stage.forward(torch.tensor(ids), stage.new_cache())
    return None if found is None else found.numpy()
