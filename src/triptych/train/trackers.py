"""Other programs that a run tells its metrics to: TensorBoard and Weights & Biases, if installed.

`metrics.jsonl` is always written, whatever is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from triptych.errors import Problem

_MODULES = {
    "tensorboard": "triptych.train.tensorboard_tracker",
    "wandb": "triptych.train.wandb_tracker",
}


class Tracker(Protocol):
    """Takes numbers by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""

    def close(self) -> None:
        """Writes what is left."""


def missing_trackers(names: Sequence[str]) -> list[Problem]:
    """A problem for each that is not installed."""
    rule = "a tracker is a package that is installed; metrics.jsonl is written without any"
    return [
        Problem(f"[run] trackers: {name} is not installed", rule, f"pip install {name}")
        for name in names
        if find_spec(name) is None
    ]


def open_trackers(names: Sequence[str], run: Path, job: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run, for rank 0."""
    return [import_module(_MODULES[name]).open_tracker(run, job) for name in names]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, those of tables as `table/name`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found
