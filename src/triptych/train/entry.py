"""Where a rank begins, for the launcher: it names this function without importing what trains."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from triptych.train.environment import place
from triptych.train.failure import write_error
from triptych.train.folder import RunFolder
from triptych.train.result import Summary
from triptych.train.status import StatusFile

WORKER = "triptych.train.worker"


def run_rank(folder: str) -> Summary:
    """Trains the run in a folder as the rank that the environment says."""
    summary: Summary = _worker(RunFolder(Path(folder))).run_rank(folder)
    return summary


def _worker(run: RunFolder) -> Any:
    """What trains. If it cannot be imported, the rank's error file says why."""
    try:
        return import_module(WORKER)
    except Exception as error:
        here = place()
        rank = here.rank if here else 0
        write_error(run, rank, StatusFile(run.status(rank)).now, error)
        raise
