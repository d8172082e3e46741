"""Where a run stands and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Position(NamedTuple):
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # samples consumed


class Summary(NamedTuple):
    """How a launch ended."""

    step: int
    loss: float | None  # of the last step; None if there was no step to do
    eval_loss: float | None
    checkpoint: Path | None  # the last one written in this launch
