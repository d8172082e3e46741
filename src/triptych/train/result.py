"""Where a run stands and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Position(NamedTuple):
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # samples consumed
    unseen: int = 0  # steps that are not in the optimizer's moments: not applied, or before them

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """The position in the state of a checkpoint."""
        return cls(int(state["step"]), int(state["samples"]), int(state.get("unseen", 0)))


class Summary(NamedTuple):
    """How a launch ended."""

    step: int
    loss: float | None  # of the last step; None if there was no step to do
    eval_loss: float | None
    checkpoint: Path | None  # the newest one
    stopped_by: str | None = None  # the signal that ended it before its last step
