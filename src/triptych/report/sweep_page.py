"""A sweep as one self-contained HTML file: speed and memory as curves, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from triptych.report.chart import Series, line_chart
from triptych.report.html import environment, write_page
from triptych.report.sweep import sweep_cells

_CURVES = {
    "tokens per second": "tokens_per_s",
    "memory of the largest rank, GiB": "peak_memory_gib",
}


def write_sweep(document: Mapping[str, Any], out: Path) -> Path:
    """Writes the page of a sweep to `out` (folders are made); returns `out`."""
    return write_page(sweep_page(document), out)


def sweep_page(document: Mapping[str, Any]) -> str:
    """The page of a sweep, from the JSON document of `triptych plan --sweep`."""
    heading, rows = sweep_cells(document)
    keys = document["sweep"]
    return (
        environment()
        .get_template("sweep.html.j2")
        .render(
            title=f"{document['model']}: {', '.join(keys)}",
            subtitle=document["cluster"],
            heading=heading,
            rows=rows,
            best=document["best"],
            objective=document["objective"],
            charts=[Markup(chart) for chart in _charts(keys, document["rows"])],
            problems=[row["problem"] for row in document["rows"] if row["problem"]],
        )
    )


def _charts(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Curves over the first key that counts something, one for each value of the others."""
    across = next((key for key in keys if all(str(row[key]).isdecimal() for row in rows)), None)
    if across is None:
        return []
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = ", ".join(f"{key}={row[key]}" for key in keys if key != across)
        if row["plan"]:
            lines.setdefault(name or across, []).append(row)
    return [
        line_chart(
            f"{title}, by {across}",
            [
                Series(
                    name,
                    "train" if index % 2 == 0 else "eval",
                    sorted((int(row[across]), row[field]) for row in line),
                    has_dots=True,
                    across=across,
                )
                for index, (name, line) in enumerate(lines.items())
            ],
            width=560,
            height=280,
        )
        for title, field in _CURVES.items()
    ]
