"""Chosen steps of all ranks in one file that ui.perfetto.dev and chrome://tracing open.

A process of the trace is a rank; its rows are computing, waiting for others, and the rest. Times
are wall clock, so ranks of several nodes are as far apart as their clocks are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.schedule.timeline import COMPUTE_WORK, Work, work_of
from triptych.train.folder import write_text

_ROWS = ("compute", "communication", "other")


class RankSpan(NamedTuple):
    """A stretch of work of a rank."""

    rank: int
    label: str
    start_s: float  # wall clock
    end_s: float


class Trace:
    """Collects steps and writes the file anew after each."""

    def __init__(self, path: Path, ranks: Sequence[str]) -> None:
        self._path = path
        self._events = [event for rank, name in enumerate(ranks) for event in _names(rank, name)]
        self._origin_s: float | None = None

    def add(self, step: int, spans: Sequence[RankSpan]) -> None:
        """A step is in the file."""
        if not spans:
            return
        first_s = min(span.start_s for span in spans)
        if self._origin_s is None:
            self._origin_s = first_s
        for span in spans:
            self._events.append(_event(span, step, self._origin_s))
        document = {"traceEvents": self._events, "displayTimeUnit": "ms"}
        write_text(self._path, json.dumps(document))


def _names(rank: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    for row, title in enumerate(_ROWS):
        yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": title}}


def _event(span: RankSpan, step: int, origin_s: float) -> dict[str, Any]:
    work = work_of(span.label)
    waits = work in (Work.WAITING, Work.COMMUNICATION)
    row = "compute" if work in COMPUTE_WORK else "communication" if waits else "other"
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": _ROWS.index(row),
        "name": span.label,
        "cat": str(work),
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"step": step},
    }
