"""Numbers and tables as text, shared by the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.report.compare import Comparison
from triptych.units import GIB, format_bytes, format_count, format_seconds

ABSENT = "-"


def share(value: float | None) -> str:
    """A share in per cent: `0.123` -> `12.3 %`."""
    return ABSENT if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Seconds with a fitting prefix."""
    return ABSENT if value is None else format_seconds(value) if value else "0 s"


def gib(value: float | None) -> str:
    """GiB with a fitting prefix: `0.25` -> `256.00 MiB`."""
    return ABSENT if value is None else format_bytes(value * GIB)


def per_second(value: float | None) -> str:
    """A rate: `12345.6` -> `12.3k/s`."""
    return ABSENT if value is None else f"{format_count(value)}/s"


def number(value: float | None, pattern: str = ".4g") -> str:
    """A plain number; words for what is no number."""
    if value is None:
        return ABSENT
    return format(value, pattern) if math.isfinite(value) else str(value)


def quantity(value: float | None, unit: str) -> str:
    """A value of a `Comparison` in its unit."""
    if value is None:
        return ABSENT
    formats = {"s": seconds, "bytes": format_bytes, "share": share, "per_s": per_second}
    return formats[unit](value)


def signed_error(row: Comparison) -> str:
    """How far the prediction is off: `+12 %`; shares differ in points."""
    if row.unit == "share" and row.predicted is not None and row.measured is not None:
        return f"{100 * (row.predicted - row.measured):+.1f} points"
    error = row.relative_error
    return ABSENT if error is None else f"{100 * error:+.0f} %"


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Rows in columns; the first is the heading. `align` has one of `<`, `>` a column.

    Two spaces between columns; nothing after the last text of a line.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    lines = [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def bar(value: float, largest: float, width: int) -> str:
    """A bar of up to `width` characters; a positive value has at least one."""
    length = round(width * value / largest) if largest > 0 else 0
    return "#" * max(length, 1 if value > 0 else 0)


def plan_name(prediction: Mapping[str, Any]) -> str:
    """The plan of a prediction in one line."""
    plan = prediction.get("plan")
    if isinstance(plan, Mapping):
        return str(plan["short"]) if "short" in plan else _degrees(plan)
    return str(plan) if plan else ABSENT


def short_names(predictions: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The settings that all plans of a list share, and each plan's name without them.

    Degrees stay in the names: `tp=2,pp=2,dp=1`, and apart from that what differs.
    """
    words = [plan_name(prediction).split(",") for prediction in predictions]
    shared = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    shared = {word for word in shared if word.split("=")[0] not in ("tp", "pp", "dp")}
    common = ",".join(word for word in words[0] if word in shared) if words else ""
    return common, [",".join(word for word in name if word not in shared) for name in words]


def _degrees(plan: Mapping[str, Any]) -> str:
    names = ("tp", "pp", "dp", "cp", "ep", "zero", "microbatch", "recompute")
    return ",".join(f"{name}={plan[name]}" for name in names if name in plan)
