"""Metrics for TensorBoard: event files in the run folder's `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes scalars."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


def open_tracker(run: Path, job: Mapping[str, Any]) -> TensorBoard:
    """Event files of a run."""
    return TensorBoard(run / "tensorboard")
