"""Where a rank begins, for the launcher: it names this function without importing what trains."""

from __future__ import annotations

from importlib import import_module

from triptych.train.result import Summary

WORKER = "triptych.train.worker"


def run_rank(folder: str) -> Summary:
    """Trains the run in a folder as the rank that the environment says."""
    summary: Summary = import_module(WORKER).run_rank(folder)
    return summary
