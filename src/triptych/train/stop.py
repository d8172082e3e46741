"""Signals that ask a run to save and end: batch systems send one before they kill.

A rank only notes the signal. The note travels with the next step's loss, so that all ranks learn of
it at the same step, whichever of them was asked.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75
"""Of a run that was asked to end and saved: EX_TEMPFAIL of sysexits.h, "try again later"."""


class StopRequest:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def is_made(self) -> bool:
        """True once a signal has come."""
        return self._number is not None

    @property
    def words(self) -> str:
        """Who asked."""
        if self._number is None:
            return "a signal to another rank"
        return signal.Signals(self._number).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the signals are noted instead of ending the process; only in the main thread."""
        former = {number: signal.signal(number, self._note) for number in ASKING}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._number = number
