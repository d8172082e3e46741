"""The logits of a served model after given tokens, computed in given pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych.plan.plan import Plan
from triptych.serve.core.step import Chunk, Start, Step
from triptych.serve.engine.replica import load_rank
from triptych.serve.engine.sampler import Drawn
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.worker import Work

Logits = np.ndarray[Any, np.dtype[Any]]
SETTINGS = EngineSettings(max_running=1, num_blocks=32, token_budget=128)


class _Keeps:
    """In the place of a sampler: keeps the logits."""

    logits: torch.Tensor

    def sample(self, logits_NV: torch.Tensor, _: object) -> Drawn:
        self.logits = logits_NV.clone()
        return Drawn([0], {})


def logits_in_pieces(
    folder: Path, plan: Plan, ids: list[int], sizes: Sequence[int], strict: bool
) -> Logits | None:
    """The logits [V] after the last of `ids`, sent in pieces of `sizes`; on the sampling rank."""
    source = ModelSource.open(folder)
    settings = SETTINGS if max(sizes) < 128 else EngineSettings(num_blocks=512, token_budget=8192)
    worker = load_rank(source, plan, settings, plan.world_size, strict=strict).worker
    keeps = _Keeps()
    is_sampler = worker._sampler is not None
    worker._sampler = keeps if is_sampler else None  # type: ignore[assignment]
    blocks = tuple(range(-(-len(ids) // settings.block_size)))
    start, at = Start(0, 1, 0, 0, tuple(ids), blocks), 0
    for number, size in enumerate(sizes):
        is_last = at + size == len(ids)
        chunk = Chunk(0, at, size, (0,) if is_last else ())
        started = (start,) if number == 0 else ()
        done = worker.run(Work(Step(number, (), started, (), (), (), (), (chunk,))))
        at += size
        if worker.mesh.rank == 0 and done is None:
            worker.hear()
    worker.finish()
    return keeps.logits[0].float().numpy() if is_sampler else None
