"""Work on a disk that may fail for a moment or be full: tried again, then explained."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from triptych.errors import StorageError
from triptych.units import format_bytes

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How often work on the files of a checkpoint in `folder` is tried.

    `retries` times more than once, after waits of `wait_s`, twice that, four times that, ...
    """

    folder: Path
    needed_bytes: int
    retries: int = 0
    wait_s: float = 1.0

    def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may be called again after an error of the file system.

        Raises StorageError with needed and free bytes after the last attempt.
        """
        for attempt in range(self.retries):
            try:
                return work()
            except OSError as error:
                wait_s = self.wait_s * 2**attempt
                _log.warning(
                    "writing a checkpoint to %s failed (%s); again in %g s",
                    self.folder,
                    error,
                    wait_s,
                )
                time.sleep(wait_s)
        try:
            return work()
        except OSError as error:
            raise not_written(self.folder, self.needed_bytes, str(error)) from error


def not_written(folder: Path, needed_bytes: int, why: str) -> StorageError:
    """The error of a checkpoint that could not be written."""
    free = free_bytes(folder)
    return StorageError(
        f"the checkpoint could not be written to {folder}: {why}\n"
        f"    needed: {needed_bytes} bytes ({format_bytes(needed_bytes)}), "
        f"free: {free} bytes ({format_bytes(free)})\n"
        "    works: free some space, keep fewer checkpoints, or use another folder; "
        "earlier checkpoints are untouched"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to where `folder` is or will be; 0 if nobody knows."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            try:
                return shutil.disk_usage(path).free
            except OSError:
                break
    return 0
