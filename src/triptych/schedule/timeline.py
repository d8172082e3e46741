"""What happened when, on which rank: predicted by a simulation or recorded by a run.

Both have this one type, so a report lays one over the other. Seconds count from the start of the
step; the labels of a recorded timeline may name other work too (`recv`, `data_comm`, `optimizer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from triptych.errors import InputError

SCHEMA_VERSION = 1


class Work(StrEnum):
    """The sort of work that a label names."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    WAITING = "waiting for a stage"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    OTHER = "other"


COMPUTE_WORK = frozenset({Work.FORWARD, Work.BACKWARD, Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT})

_COMPUTE_LABEL = re.compile(r"(\d+)([FBIW])(\d+)")
_BY_LETTER = {
    "F": Work.FORWARD,
    "B": Work.BACKWARD,
    "I": Work.INPUT_GRADIENT,
    "W": Work.WEIGHT_GRADIENT,
}
_WAITING_LABEL = re.compile(r"pipeline_comm|recv|\d+RECV_[FB]\d+")
_COMMUNICATION_LABEL = re.compile(r"(^|\d|_)(comm|send|recv)(_|$)", re.IGNORECASE)


def work_of(label: str) -> Work:
    """The sort of work of a label: `2F0` -> forward, `data_comm` -> communication.

    Communication along the pipeline is what a rank waits for, so it is part of the bubble.
    """
    if match := _COMPUTE_LABEL.fullmatch(label):
        return _BY_LETTER[match[2]]
    if _WAITING_LABEL.fullmatch(label):
        return Work.WAITING
    if _COMMUNICATION_LABEL.search(re.sub(r"\d+$", "", label)):
        return Work.COMMUNICATION
    return Work.OPTIMIZER if label == "optimizer" else Work.OTHER


def microbatch_of(label: str) -> str:
    """The micro-batch number in the label of a compute span; empty for other labels."""
    match = _COMPUTE_LABEL.fullmatch(label)
    return match[3] if match else ""


def stage_of(label: str) -> int | None:
    """The stage in the label of a compute span; None for other labels."""
    match = _COMPUTE_LABEL.fullmatch(label)
    return int(match[1]) if match else None


class Span(NamedTuple):
    """One stretch of work on one rank."""

    rank: int  # pipeline rank
    label: str  # an action such as `2F0`, or the name of other work
    start_s: float  # from the start of the step
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, over all pipeline ranks."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def start_s(self) -> float:
        """When the first span starts."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last span ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @property
    def compute(self) -> Timeline:
        """The same timeline without communication, optimizer and other work."""
        spans = tuple(span for span in self.spans if work_of(span.label) in COMPUTE_WORK)
        return self if len(spans) == len(self.spans) else Timeline(spans, self.num_ranks)

    @property
    def chunk_of_stage(self) -> dict[int, int]:
        """For each stage that computes, which of its rank's stages it is: 0 for the first."""
        by_rank: dict[int, set[int]] = {}
        for span in self.spans:
            stage = stage_of(span.label)
            if stage is not None:
                by_rank.setdefault(span.rank, set()).add(stage)
        return {
            stage: chunk
            for stages in by_rank.values()
            for chunk, stage in enumerate(sorted(stages))
        }

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes (forward or backward)."""
        return sum(
            span.duration_s
            for span in self.spans
            if span.rank == rank and work_of(span.label) in COMPUTE_WORK
        )

    @property
    def longest_span_s(self) -> float:
        """The longest time from a rank's first compute to its last.

        What a step costs where ranks need not end it together (Qi et al. 2024, sec. 5.3).
        """
        first_s: dict[int, float] = {}
        last_s: dict[int, float] = {}
        for span in self.compute.spans:
            first_s[span.rank] = min(first_s.get(span.rank, span.start_s), span.start_s)
            last_s[span.rank] = max(last_s.get(span.rank, span.end_s), span.end_s)
        return max((last_s[rank] - first_s[rank] for rank in first_s), default=0.0)

    @property
    def idle_s(self) -> float:
        """Seconds without compute, summed over ranks, between first and last compute of the step.

        Waiting for a message counts as idle.
        """
        busy_s, window_s = self._busy_and_window_s()
        return window_s - busy_s

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, the "bubble rate" (Qi et al. 2024, sec. 5.3).

        (p-1)/(m+p-1) for 1F1B with equal stages.
        """
        busy_s, window_s = self._busy_and_window_s()
        return (window_s - busy_s) / window_s if window_s else 0.0

    @property
    def bubble_inside_spans(self) -> float:
        """Share of the longest span that even the busiest rank's work leaves idle.

        The "bubble rate" of zero-bubble schedules (Qi et al. 2024, sec. 5.3): 0 for ZB-H2 and ZB-V
        with F = I = W, although ranks start and end apart.
        """
        longest_s = self.longest_span_s
        busy_s = max((self.busy_s(rank) for rank in range(self.num_ranks)), default=0.0)
        return max(0.0, 1.0 - busy_s / longest_s) if longest_s else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over compute time, both summed over ranks (Narayanan et al. 2021, sec. 2.2).

        (p-1)/m for 1F1B with equal stages.
        """
        busy_s, window_s = self._busy_and_window_s()
        return (window_s - busy_s) / busy_s if busy_s else 0.0

    def _busy_and_window_s(self) -> tuple[float, float]:
        """Compute seconds, and seconds between first and last compute; both over all ranks."""
        compute = self.compute
        busy_s = sum(span.duration_s for span in compute.spans)
        return busy_s, self.num_ranks * compute.makespan_s

    def to_json(self) -> dict[str, Any]:
        """A JSON document: each span is [rank, label, start_s, end_s]."""
        return {
            "schema_version": SCHEMA_VERSION,
            "num_ranks": self.num_ranks,
            "spans": [list(span) for span in self.spans],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Timeline:
        """The timeline that `to_json` wrote. Raises InputError for anything else."""
        if document.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"timeline: schema_version {document.get('schema_version')!r}; "
                f"this version reads {SCHEMA_VERSION}"
            )
        try:
            spans = tuple(
                Span(int(rank), str(label), float(start_s), float(end_s))
                for rank, label, start_s, end_s in document["spans"]
            )
            return cls(spans, int(document["num_ranks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"timeline: not [rank, label, start_s, end_s] spans: {error}"
            ) from None
