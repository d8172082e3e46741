"""Where each rank is: a file of fixed size per rank, mapped into memory and thus nearly free.

The launcher reads the files when a rank has died and cannot tell itself.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_SIZE_BYTES = 512


class Phase(StrEnum):
    """What a rank is doing."""

    START = "start"
    PREFLIGHT = "pre-flight"
    LOAD = "load"
    DATA = "data"
    STEP = "forward/backward"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The last thing that a rank wrote about itself."""

    pid: int
    host: str
    step: int
    phase: Phase
    time_s: float  # wall clock, when the phase began


class StatusFile:
    """Writes this rank's status; costs microseconds and no system call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b" " * _SIZE_BYTES)
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), _SIZE_BYTES)
        self._pid = os.getpid()
        self._host = socket.gethostname()
        self.now = Status(
            pid=self._pid, host=self._host, step=0, phase=Phase.START, time_s=time.time()
        )
        self.set(0, Phase.START)

    def set(self, step: int, phase: Phase) -> None:
        """The rank is in `phase` of `step` from now on."""
        self.now = Status(
            pid=self._pid, host=self._host, step=step, phase=phase, time_s=time.time()
        )
        values = {"pid": self._pid, "host": self._host, "step": step, "phase": phase.value}
        text = json.dumps(values | {"time_s": self.now.time_s}) + "\n"
        self._map[:] = text.encode()[:_SIZE_BYTES].ljust(_SIZE_BYTES)


def read_status(path: Path) -> Status | None:
    """A rank's last status; None if it never wrote one."""
    try:
        values = json.loads(path.read_text("utf-8"))
        return Status(
            pid=int(values["pid"]),
            host=str(values["host"]),
            step=int(values["step"]),
            phase=Phase(values["phase"]),
            time_s=float(values["time_s"]),
        )
    except (OSError, ValueError, KeyError):
        return None
