"""Serving plans as one self-contained HTML file: the ranked table, a step and memory by term."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.report.html import environment, write_page
from triptych.report.serving import STEP_TERMS, serving_cells
from triptych.report.text import gib, seconds


def write_serving(document: Mapping[str, Any], out: Path) -> Path:
    """Writes the page of serving plans to `out` (folders are made); returns `out`."""
    return write_page(serving_page(document), out)


def serving_page(document: Mapping[str, Any]) -> str:
    """The page of serving plans, from the JSON document of `triptych plan --task serve`."""
    heading, rows = serving_cells(document)
    plans = document["plans"]
    return (
        environment()
        .get_template("serving.html.j2")
        .render(
            title=f"Serving {document['model']}",
            subtitle=f"{document['cluster']}, engine {document['engine']}, "
            f"{document['input_tokens']:.0f} tokens in, {document['output_tokens']:.0f} out",
            heading=heading,
            rows=rows,
            reasons=[plan["reason"] for plan in plans],
            short=plans[0]["plan"]["short"],
            binds=list(document.get("binds") or ()),
            step=_bars({STEP_TERMS[k]: v for k, v in plans[0]["step_s"].items()}, seconds),
            memory=_bars({k.replace("_", " "): v for k, v in plans[0]["memory_gib"].items()}, gib),
            next=document.get("next", ""),
        )
    )


def _bars(terms: Mapping[str, float], text: Any) -> list[tuple[str, str, float]]:
    """Name, value and length in per cent of the longest."""
    longest = max(terms.values(), default=0.0) or 1.0
    return [(name, text(value), 100 * value / longest) for name, value in terms.items()]
