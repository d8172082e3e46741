"""`triptych serve` in a process of its own, for benchmarks of what its clients see."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

_GOODBYE_S = 60.0


@contextmanager
def server(
    served: Path, *options: str, log: Path | None = None
) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of its interface, with /v1, and its process; it ends with the block.

    What it says goes into `log`. Raises SystemExit if it ends in another way than it was told to.
    """
    command = [sys.executable, "-m", "triptych", "serve", str(served), "--port", "0", *options]
    with log.open("w+") if log else tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=said)
        try:
            yield _url(process, said), psutil.Process(process.pid)
            process.terminate()
            if process.wait(_GOODBYE_S) != 0:
                raise SystemExit(f"the server ended with code {process.returncode}")
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], said: IO[str]) -> str:
    """Waits until it takes requests."""
    while True:
        is_over = process.poll() is not None
        said.seek(0)
        text = said.read()
        if ready := re.search(r"at (http\S+/v1),", text):
            return ready[1]
        if is_over:
            raise SystemExit(f"the server ended with code {process.returncode}:\n{text}")
        time.sleep(0.1)


def memory_bytes(process: psutil.Process) -> int:
    """Resident bytes of all processes of a server."""
    everybody = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in everybody)
