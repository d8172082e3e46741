"""An engine under a plan in tests: rank 0 drives it, the others follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from layouts import STRICT

from triptych.plan.plan import Plan
from triptych.serve.core.check import broken_invariants
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.replica import follow_rank
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.values import Ask, Output


class Served(NamedTuple):
    """What an engine gave: tokens by request and continuation, all outputs, its last load."""

    tokens: dict[tuple[int, int], list[int]]
    outputs: list[Output]
    load: Load


def serve(
    folder: Path,
    plan: Plan | None,
    settings: EngineSettings,
    asks: Sequence[Ask],
    seed: int | None = None,
) -> Served | None:
    """Answers requests that arrive at random moments between steps (all at once without a seed)."""
    if dist.is_initialized() and dist.get_rank() != 0:
        assert plan is not None
        follow_rank(folder, plan, settings, strict=STRICT)
        return None
    outputs: list[Output] = []
    draws = random.Random(seed)
    with Engine.open(folder, plan, settings, strict=STRICT) as engine:
        for ask in asks:
            for _ in range(0 if seed is None else draws.randrange(4)):
                outputs += engine.step()
            assert engine.add_request(ask).refusal is None
        while engine.is_busy:
            outputs += engine.step()
        assert broken_invariants(engine.scheduler) == []
        assert engine.load.num_free_blocks == engine.limits.num_blocks
        load = engine.load
    found: dict[tuple[int, int], list[int]] = {}
    for output in outputs:
        assert output.token is not None
        found.setdefault((output.request_id, output.continuation), []).append(output.token)
    return Served(found, outputs, load)


def random_prompts(count: int, longest: int, known: int, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths of tokens below `known`, half of which begin like another one."""
    draws = random.Random(seed)
    common = [draws.randrange(known) for _ in range(longest)]
    found = []
    for number in range(count):
        size = draws.randint(1, longest)
        own = [draws.randrange(known) for _ in range(size)]
        shared = size * 2 // 3 if number % 2 else 0
        found.append(common[:shared] + own[shared:])
    return found
