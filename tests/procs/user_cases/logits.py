"""The logits of a model folder under a plan, as its ranks compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ranks import STRICT, run_ranks
from stepwise import logits_in_pieces

from triptych.plan.plan import Plan

Logits = np.ndarray[Any, np.dtype[Any]]


def logits(folder: Path, plan: Plan, ids: list[int]) -> Logits:
    """The logits [V] after the last of some tokens, as they are sampled from."""
    answers = run_ranks(plan.world_size, _logits, folder, plan, ids)
    (last,) = [answer for answer in answers if answer is not None]
    found: Logits = last
    return found


def _logits(folder: Path, plan: Plan, ids: list[int]) -> Logits | None:
    return logits_in_pieces(folder, plan, ids, [len(ids)], STRICT)
