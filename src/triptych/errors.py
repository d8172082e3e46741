"""The one error tree.

TriptychError
├── InputError            what the user gave cannot work (exit code 2, nothing written)
│   ├── ModelError        a model that is unknown or cannot be counted or run
│   ├── ClusterError      a cluster that cannot be read
│   ├── ScheduleError     a pipeline program that is not legal
│   ├── PlanError         a plan that breaks rules for this model, cluster or workload
│   ├── JobError          a job file with unknown keys or wrong values
│   ├── DataError         a data set that cannot be trained on
│   └── CheckpointError   a checkpoint that is incomplete, damaged or of another model
└── RunError              a run that had started and failed (exit code 1)
    └── StorageError      what could not be written to a disk; nothing else is lost by it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: what was given, which rule it breaks, and what would work."""

    what: str
    rule: str = ""
    works: str = ""

    def __str__(self) -> str:
        parts = [self.what]
        if self.rule:
            parts.append(f"rule: {self.rule}")
        if self.works:
            parts.append(f"works: {self.works}")
        return "\n    ".join(parts)


class TriptychError(Exception):
    """Base of every error that Triptych raises on purpose."""

    exit_code = 1


class InputError(TriptychError):
    """Bad input: lists every problem at once; the command ends with exit code 2."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Sequence[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class ModelError(InputError):
    """A model that is unknown or that cannot be counted or run."""


class ClusterError(InputError):
    """A cluster that cannot be read."""


class ScheduleError(InputError):
    """A pipeline program that is not legal."""


class PlanError(InputError):
    """A plan that breaks rules for this model, cluster or workload."""


class JobError(InputError):
    """A job file with unknown keys or wrong values."""


class DataError(InputError):
    """A data set that cannot be trained on."""


class CheckpointError(InputError):
    """A checkpoint that is incomplete, damaged or of another model."""


class RunError(TriptychError):
    """A run that had started and failed."""


class StorageError(RunError):
    """A file system that failed or was full: what was there before is as it was."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names closest to `word`, best first; for messages about unknown names."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.5)
    return [by_lower[name] for name in close]
