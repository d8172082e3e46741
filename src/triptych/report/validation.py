"""A validation as text: errors by source, then order of plans, fit and error bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.report.text import ABSENT, share, table

_FIGURES = ("median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "bias")
_WIDEST = 40


def validation_text(document: Mapping[str, Any]) -> str:
    """The JSON document of `triptych validate` in words."""
    parts = [f"{document['used']} of {document['rows']} rows compared"]
    parts[0] += "".join(f"\n  {n} skipped: {why}" for why, n in document["skipped"].items())
    for name in ("step_time", "memory", "tpot", "ttft", "throughput"):
        if document.get(name, {}).get("n"):
            parts.append(_errors(name.replace("_", " "), document[name]))
    if "ranking" in document:
        parts.append("\n".join(_rest(document)))
    return "\n\n".join(parts)


def _errors(title: str, quantity: Mapping[str, Any]) -> str:
    rows: list[Sequence[str]] = [(title, "rows", "median", "mean", "p90", "bias")]
    for source, figures in quantity["by_source"].items():
        rows.append(_line(source[:_WIDEST], figures))
    rows.append(_line("mean of sources", quantity["source_mean"]))
    rows.append(_line("all rows", quantity))
    return f"{table(rows, '<>>>>>')}\nworst source: {quantity['worst_source']}"


def _line(name: str, figures: Mapping[str, Any]) -> Sequence[str]:
    return (name, str(figures["n"]), *(share(figures[key]) for key in _FIGURES))


def _rest(document: Mapping[str, Any]) -> Sequence[str]:
    ranking, failed, ran = document["ranking"], document["oom"], document["ran"]
    regret = ABSENT if ranking["regret"] is None else f"{ranking['regret']:.3f}"
    return (
        f"order of plans   {ranking['agree']} of {ranking['pairs']} pairs as measured "
        f"(mean of sources {share(ranking['source_mean'])}), regret {regret}",
        f"out of memory    {failed['predicted_oom']} of {failed['rows']} predicted so; "
        f"{ran['predicted_to_fit']} of {ran['ran']} that ran predicted to fit",
        f"80 % error bars  hold {share(document['coverage_80'])} of step times, "
        f"median half-width {share(document['half_width_median'])}",
    )
