"""Predicted beside measured: the same quantities, under the same names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.report.run import Run, Step
from triptych.units import GIB

MOST_WARMUP_STEPS = 10

# Step time in the order of DESIGN: work first, then what is waited for.
TIME_TERMS = (
    "compute",
    "tensor_comm",
    "pipeline_comm",
    "data_comm",
    "context_comm",
    "expert_comm",
    "bubble",
    "optimizer",
)
WAITS = ("pipeline_comm", "bubble")
AXES = ("tensor", "pipeline", "data", "context", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity; None where it was not predicted or not measured."""

    name: str
    unit: str  # "s", "bytes", "share" or "per_s"
    predicted: float | None
    measured: float | None
    is_part: bool = False  # of the step time

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's steps in one value: medians over the steps after the warm-up."""

    num_steps: int  # steps that the medians are over
    step_time_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    data_wait_s: float | None
    time_s: Mapping[str, float]
    bytes_sent: Mapping[str, float]
    memory_bytes: float | None  # the largest


def measured(steps: Sequence[Step]) -> Measured:
    """Medians of what was measured under the last plan, without the first fifth (10 at most).

    The first steps allocate memory and open connections.
    """
    steps = [step for step in steps if step.plan == steps[-1].plan]
    steady = steps[min(MOST_WARMUP_STEPS, len(steps) // 5) :]
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return Measured(
        num_steps=len(steady),
        step_time_s=_median([step.step_time_s for step in steady]),
        tokens_per_s=_median([step.tokens_per_s for step in steady]),
        mfu=_median([step.mfu for step in steady]),
        data_wait_s=_median([step.data_wait_s for step in steady]),
        time_s=_medians([step.time_s for step in steady]),
        bytes_sent=_medians([step.bytes_sent for step in steady]),
        memory_bytes=max(memory, default=None),
    )


def _median(values: Sequence[float | None]) -> float | None:
    present = sorted(value for value in values if value is not None and math.isfinite(value))
    middle = len(present) // 2
    if not present:
        return None
    return present[middle] if len(present) % 2 else (present[middle - 1] + present[middle]) / 2


def _medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    medians = {name: _median([table.get(name, 0.0) for table in tables]) for name in names}
    return {name: value for name, value in medians.items() if value is not None}


def comparisons(run: Run) -> tuple[Comparison, ...]:
    """Step time and its parts, bubble, bytes by axis and memory of a run.

    Rows of parts that are zero or absent on both sides are left out.
    """
    prediction: Mapping[str, Any] = run.prediction or {}
    actual = measured(run.steps)
    peak_gib = prediction.get("peak_memory_gib")
    rows = [
        _row("step time", "s", prediction.get("step_time_s"), actual.step_time_s),
        *_step_time_parts(prediction.get("time_s") or {}, actual.time_s),
        _row("tokens per second", "per_s", _tokens_per_s(run), actual.tokens_per_s),
        _row("MFU", "share", prediction.get("mfu"), actual.mfu),
        _row("data wait", "s", None, actual.data_wait_s),
        _row("bubble fraction", "share", prediction.get("bubble_fraction"), _bubble(run)),
        *_bytes_by_axis(prediction.get("bytes_sent_per_rank") or {}, actual.bytes_sent),
        _row("peak memory", "bytes", peak_gib and peak_gib * GIB, actual.memory_bytes),
    ]
    return tuple(row for row in rows if row.predicted is not None or row.measured is not None)


def _row(name: str, unit: str, predicted: float | None, actual: float | None) -> Comparison:
    return Comparison(name=name, unit=unit, predicted=predicted, measured=actual)


def _step_time_parts(
    predicted: Mapping[str, float], actual: Mapping[str, float]
) -> Iterator[Comparison]:
    order: Sequence[str] = TIME_TERMS
    actual = _with_ties_in_data(actual)
    if actual and "bubble" not in actual:
        order = [*TIME_TERMS[:-1], "bubble_and_pipeline", TIME_TERMS[-1]]
        predicted, actual = _with_one_wait(predicted), _with_one_wait(actual)
    for name, (ours, theirs) in _joined(predicted, actual, order).items():
        if name != "step":  # the whole is no part
            yield Comparison(
                name=worded(name), unit="s", predicted=ours, measured=theirs, is_part=True
            )


def _with_ties_in_data(terms: Mapping[str, float]) -> dict[str, float]:
    """The exchange of a tied embedding is predicted as part of the gradients' exchange."""
    rest = {name: value for name, value in terms.items() if name != "tie_comm"}
    if "tie_comm" in terms:
        rest["data_comm"] = rest.get("data_comm", 0.0) + terms["tie_comm"]
    return rest


def _with_one_wait(terms: Mapping[str, float]) -> dict[str, float]:
    """Bubble and pipeline communication as one term.

    A rank that waits for a neighbour cannot tell whether it waits for the message or for the work
    that comes before it, so a run measures the two together.
    """
    waits_s = [terms[name] for name in WAITS if name in terms]
    rest = {name: value for name, value in terms.items() if name not in WAITS}
    return rest | ({"bubble_and_pipeline": sum(waits_s)} if waits_s else {})


def _bytes_by_axis(
    predicted: Mapping[str, float], actual: Mapping[str, float]
) -> Iterator[Comparison]:
    for axis, (ours, theirs) in _joined(predicted, actual, AXES).items():
        yield _row(f"{axis} axis, sent per rank", "bytes", ours, theirs)


def _joined(
    predicted: Mapping[str, float], actual: Mapping[str, float], order: Sequence[str]
) -> dict[str, tuple[float | None, float | None]]:
    """Both sides by name, known names first; without names that are zero on both sides."""
    names = [*order, *sorted((predicted.keys() | actual.keys()) - set(order))]
    return {
        name: (predicted.get(name), actual.get(name))
        for name in names
        if predicted.get(name) or actual.get(name)
    }


def worded(name: str) -> str:
    """A field name as words: `data_comm` -> `data communication`."""
    return name.replace("_comm", "_communication").replace("_", " ")


def _tokens_per_s(run: Run) -> float | None:
    """Tokens of a step over the predicted step time: what the whole cluster would do."""
    predicted_s = (run.prediction or {}).get("step_time_s")
    tokens = next((step.tokens for step in reversed(run.steps) if step.tokens), None)
    return tokens / predicted_s if tokens and predicted_s else None


def _bubble(run: Run) -> float | None:
    return run.timeline.bubble_fraction if run.timeline and run.timeline.spans else None
