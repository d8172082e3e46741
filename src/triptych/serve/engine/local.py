"""Offline generation on this machine, in as many processes as the plan has ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from triptych.plan.plan import Plan
from triptych.runtime.local import local_ranks
from triptych.serve.engine.offline import Generation, Sampling, generate
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.suitable import require_suitable


def generate_locally(
    model_dir: Path,
    prompts: Sequence[str],
    plan: Plan | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generation]:
    """As `offline.generate`, with as many processes as the plan has ranks, started here.

    On CUDA each rank takes a device of its own. Raises RunError if a rank dies; none is left then.
    """
    work = partial(generate, model_dir, prompts, plan, max_new_tokens, temperature, seed)
    if plan is None or plan.world_size == 1 or dist.is_initialized():
        return work(on_text=on_text)
    Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    require_suitable(plan, ModelSource.open(model_dir).model(), plan.world_size)
    with local_ranks(plan.world_size, work):
        return work(on_text=on_text)
