"""All ranks succeed together or fail together, with the same error.

Works on objects, a few times per checkpoint, over any process group (gloo or NCCL), or within one
process without torch.distributed. Nothing here may leave one rank waiting for another that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from triptych.errors import (
    CheckpointError,
    InputError,
    Problem,
    RunError,
    StorageError,
    TriptychError,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that can travel: exceptions with arguments of their own do not pickle."""

    kind: type[TriptychError]  # of _KINDS
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, InputError):
            return cls(CheckpointError, error.problems)
        if isinstance(error, TriptychError):
            kind = StorageError if isinstance(error, StorageError) else RunError
            return cls(kind, (Problem(str(error)),))
        return cls(RunError, (Problem(f"{type(error).__name__}: {error}"),))

    def error(self) -> TriptychError:
        if self.kind is CheckpointError:
            return CheckpointError(self.problems)
        return self.kind("\n".join(str(problem) for problem in self.problems))


_KINDS = (RunError, StorageError, CheckpointError)
"""From the worst to the least."""


@dataclass(frozen=True, slots=True)
class _Result(Generic[T]):
    value: T


def _attempt(work: Callable[[], T]) -> tuple[_Result[T] | _Failure, Exception | None]:
    try:
        return _Result(work()), None
    except Exception as error:
        return _Failure.of(error), error


def _first_failure(outcomes: Sequence[object]) -> _Failure | None:
    """All failures of the worst kind as one, each problem once."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
    if not failures:
        return None
    worst = min((failure.kind for failure in failures), key=_KINDS.index)
    problems = dict.fromkeys(p for f in failures if f.kind is worst for p in f.problems)
    return _Failure(worst, tuple(problems))


class Ranks:
    """The ranks that save or load together: `group`, or all of them, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self._distributed else 0
        self.size: int = dist.get_world_size(group) if self._distributed else 1

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank; rank 0 gets all results, the others an empty list.

        If it fails on any rank, all raise the same CheckpointError, RunError or StorageError.
        """
        outcome, cause = _attempt(work)
        outcomes = self._gather(outcome)
        failure = self._broadcast(_first_failure(outcomes))
        if failure is not None:
            raise failure.error() from cause
        return [found.value for found in outcomes]

    def on_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0; every rank returns its result, or raises its error."""
        outcome, cause = _attempt(work) if self.rank == 0 else (None, None)
        shared = self._broadcast(outcome)
        if isinstance(shared, _Failure):
            raise shared.error() from cause
        assert isinstance(shared, _Result)
        return shared.value  # type: ignore[no-any-return]

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        gathered = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, group=self._group, group_dst=0)
        return gathered or []

    def _broadcast(self, value: Any) -> Any:
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]
