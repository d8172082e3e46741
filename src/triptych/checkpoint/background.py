"""One piece of work at a time beside the training thread, with an outcome that is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one function at a time in a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def has_outcome(self) -> bool:
        """True if work was started whose outcome nobody has asked for."""
        return self._thread is not None

    def start(self, work: Callable[[], T]) -> None:
        """Begins `work`; the outcome of the last one must have been asked for."""
        assert self._thread is None, f"{self._name} has an outcome that nobody asked for"
        self._result, self._error = [], None
        self._thread = threading.Thread(
            target=self._run, args=(work,), daemon=True, name=self._name
        )
        self._thread.start()

    def outcome(self) -> T:
        """Waits for the work; returns its result or raises its error."""
        assert self._thread is not None, f"{self._name} was not started"
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._result[0]

    def join(self, timeout_s: float) -> None:
        """Waits for the work, but not for longer; its outcome can still be asked for."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:
            self._error = error
