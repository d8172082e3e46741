"""Metrics for Weights & Biases; its own environment variables (`WANDB_MODE`) say where to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WeightsAndBiases:
    """A run there; a run that goes on after a restart is the same one."""

    def __init__(self, run: Path, job: Mapping[str, Any]) -> None:
        self._run: Any = wandb.init(
            dir=str(run), name=run.name, id=run.name, resume="allow", config=dict(job)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


def open_tracker(run: Path, job: Mapping[str, Any]) -> WeightsAndBiases:
    """The run there."""
    return WeightsAndBiases(run, job)
