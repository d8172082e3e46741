"""The user's present plan beside the best of ours, term by term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from triptych.report.compare import TIME_TERMS, worded
from triptych.report.text import gib, plan_name, seconds, share, table
from triptych.units import format_bytes, format_seconds

Row = tuple[str, str, str, str]


def beside_text(present: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    """The present plan's price, beside that of our best plan if there is one; what was assumed.

    `present` is that part of the JSON document of `triptych plan --from`.
    """
    theirs = present["prediction"]
    lines = [f"present plan, from {present['engine']}: {plan_name(theirs)}"]
    lines.append(f"priced as {present['program']} runs it; the best one as Triptych would")
    if not theirs.get("fits", True):
        lines.append("the present plan does not fit in memory by our account")
    heading = ("", "present", "best", "difference")
    rows = [heading, *_rows(theirs, ours or {})]
    if ours is None:
        rows = [(row[0], row[1]) for row in rows]  # type: ignore[misc]
    parts = ["\n".join(lines), table(rows, "<>>>"[: len(rows[0])])]
    for title, key in (
        ("assumed", "assumed"),
        ("not understood", "not_understood"),
        ("the model in the file differs", "model_differs"),
    ):
        parts += [f"{title}:\n{_listed(present[key])}"] if present[key] else []
    return "\n\n".join(parts)


def _rows(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Row]:
    yield _time_row("step time", theirs.get("step_time_s"), ours.get("step_time_s"))
    for name in TIME_TERMS:
        pair = theirs["time_s"].get(name, 0.0), (ours.get("time_s") or {}).get(name)
        if any(pair):
            yield _time_row("  " + worded(name), *pair)
    yield "MFU", share(theirs.get("mfu")), share(ours.get("mfu")), ""
    yield _memory_row("peak memory", theirs.get("peak_memory_gib"), ours.get("peak_memory_gib"))
    for name, value in theirs["memory_gib"].items():
        pair = value, (ours.get("memory_gib") or {}).get(name)
        if any(pair):
            yield _memory_row("  " + worded(name), *pair)


def _time_row(name: str, theirs: float | None, ours: float | None) -> Row:
    gap = None if theirs is None or ours is None else ours - theirs
    text = "" if gap is None else ("-" if gap < 0 else "+") + format_seconds(abs(gap))
    return name, seconds(theirs), seconds(ours), text


def _memory_row(name: str, theirs: float | None, ours: float | None) -> Row:
    gap = None if theirs is None or ours is None else (ours - theirs) * 1024**3
    text = "" if gap is None else ("-" if gap < 0 else "+") + format_bytes(abs(gap))
    return name, gib(theirs), gib(ours), text


def _listed(texts: Sequence[str]) -> str:
    lines = [wrap(text, width=96, subsequent_indent="    ") for text in texts]
    return "\n".join(f"  {line}" for group in lines for line in group)
