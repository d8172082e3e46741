"""A sweep as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.report.text import gib, per_second, seconds, share, table
from triptych.units import format_count


def sweep_table(document: Mapping[str, Any]) -> str:
    """The rows of a sweep; `*` marks the best one for the objective, `+` the Pareto front."""
    keys: Sequence[str] = document["sweep"]
    documents = document["rows"]
    heading, cells = sweep_cells(document)
    body = [(_mark(document, i), *row) for i, row in enumerate(cells)]
    align = "<" + ">" * len(keys) + ">>>>>" + ">" * (len(heading) - len(keys) - 6) + "<"
    notes = [
        f"* best by {document['objective']}; + none is faster with as few devices",
        *(f"{_point(keys, row)}: {row['problem']}" for row in documents if row["problem"]),
    ]
    return table([("", *heading), *body], align) + "\n\n" + "\n".join(notes)


def sweep_cells(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a sweep, without marks."""
    keys: Sequence[str] = document["sweep"]
    has_cost = any("cost_per_billion_tokens" in row for row in document["rows"])
    heading = [*keys, "step", "tokens/s", "tokens/s/GPU", "MFU", "memory", "GPU-h per B tokens"]
    heading += ["cost per B tokens"] if has_cost else []
    cells = []
    for row in document["rows"]:
        figures = [
            seconds(row.get("step_time_s")),
            per_second(row.get("tokens_per_s")).removesuffix("/s"),
            per_second(row.get("tokens_per_s_per_gpu")).removesuffix("/s"),
            share(row.get("mfu")),
            gib(row.get("peak_memory_gib")),
            _count(row.get("gpu_hours_per_billion_tokens")),
        ]
        figures += [_count(row.get("cost_per_billion_tokens"))] if has_cost else []
        cells.append([*(str(row[key]) for key in keys), *figures, row["plan"] or "none"])
    return [*heading, "plan"], cells


def _count(value: float | None) -> str:
    return "-" if value is None else format_count(value) if value >= 1000 else f"{value:.3g}"


def _mark(document: Mapping[str, Any], index: int) -> str:
    if index == document["best"]:
        return "*"
    return "+" if index in document["front"] else ""


def _point(keys: Sequence[str], row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in keys)
