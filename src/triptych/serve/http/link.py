"""The engine process as its parent sees it. Imports little: both sides load side by side."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from triptych.errors import RunError, TriptychError
from triptych.plan.plan import Plan
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.http.messages import Ended, Open, Opened

if TYPE_CHECKING:
    from triptych.serve.engine.settings import EngineSettings

_MODULE = "triptych.serve.http.engine_process"
_GOODBYE_S = 10.0
"""Seconds that an engine may take to end."""


class EngineProcess:
    """A process that becomes an engine; none is left behind.

    It has a session of its own: signals of a terminal are for the API process, which drains first.
    """

    def __init__(self) -> None:
        self.pipe, its = multiprocessing.Pipe()
        command = [sys.executable, "-m", _MODULE, str(its.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        its.close()

    def open(
        self, folder: Path, plan: Plan | None, settings: EngineSettings, policy: Policy
    ) -> None:
        """Lets it load a model; returns at once."""
        self.pipe.send(Open(folder, plan, settings, policy))

    def opened(self) -> Limits:
        """Waits until it is ready. Raises TriptychError with what kept it from that."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.death() from None
        if isinstance(message, Ended):
            raise message.error
        assert isinstance(message, Opened)
        return message.limits

    def death(self) -> TriptychError:
        """What is to be said if it ended without a word."""
        try:
            code: int | str = self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            code = "none yet"
        return RunError(f"the engine process ended with exit code {code}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self.pipe.close()
