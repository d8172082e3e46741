"""The process of a group as its parent sees it. Imports little: both sides load side by side."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from triptych.errors import RunError, TriptychError
from triptych.serve.core.limits import Limits
from triptych.serve.http.messages import Ended, Opened, Start

if TYPE_CHECKING:
    from triptych.serve.http.gpus import Gpus

_MODULE = "triptych.serve.http.group_process"
_GOODBYE_S = 10.0
"""Seconds that a group may take to end."""


class GroupProcess:
    """A process that becomes the engines of a group; none is left behind.

    It has a session of its own: signals of a terminal are for the API process, which drains first.

    Args:
        cores: of this machine that it runs on; none: all.
        gpus: it takes one for each rank once it is told what to run; None: it sees all.

    """

    def __init__(self, cores: Sequence[int] = (), gpus: Gpus | None = None) -> None:
        self._gpus = gpus
        self._taken: tuple[str, ...] = ()
        self.pipe, its = multiprocessing.Pipe()
        command = [sys.executable, "-m", _MODULE, str(its.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if cores and hasattr(os, "sched_setaffinity"):  # before it imports what counts cores
            os.sched_setaffinity(self._process.pid, cores)
        its.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def open(self, start: Start) -> None:
        """Lets it load its models; returns at once."""
        if self._gpus is not None:
            self._taken = self._gpus.take(start.world)
        self.pipe.send(start._replace(gpus=self._taken))

    def opened(self, num_models: int) -> dict[str, Limits]:
        """Waits until all are ready. Raises TriptychError with what kept them from that."""
        return limits_from(self.pipe, num_models, self.death)

    def death(self) -> TriptychError:
        """What is to be said if it ended without a word."""
        try:
            code: int | str = self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            code = "none yet"
        return RunError(f"the engine process ended with exit code {code}")

    def end(self, *, is_waited_for: bool = True) -> None:
        """Ends it: it may take its time to, or not."""
        try:
            if is_waited_for:
                self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self.pipe.close()
            if self._gpus is not None:
                self._gpus.give_back(self._taken)
                self._taken = ()

    def __enter__(self) -> GroupProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(is_waited_for=kind is None)


def limits_from(
    pipe: Connection, num_models: int, death: Callable[[], TriptychError]
) -> dict[str, Limits]:
    """Waits until a group has opened so many models. Raises TriptychError if it does not."""
    found: dict[str, Limits] = {}
    while len(found) < num_models:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            raise death() from None
        if isinstance(message, Ended):
            raise message.error
        assert isinstance(message, Opened)
        found[message.model] = message.limits
    return found
