"""Rows of a table of ratios, as text or JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any


def ratio_row(
    claim: str, peer: str, metric: str, found: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Geometric mean of the pairs' ratios, with its 95 % interval (normal, over log ratios)."""
    logs = [math.log(ours / theirs) for ours, theirs in found]
    mean = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return {
        "claim": claim,
        "peer": peer,
        "metric": metric,
        "ours": statistics.median(ours for ours, _ in found),
        "theirs": statistics.median(theirs for _, theirs in found),
        "ratio": math.exp(mean),
        "interval_95": [math.exp(mean - half), math.exp(mean + half)] if logs[1:] else None,
        "pairs": len(found),
        "better": "lower",
    }


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Prints the rows: one JSON document, or a line each."""
    if as_json:
        print(json.dumps({"rows": list(rows)}))
        return
    for row in rows:
        interval = row.get("interval_95")
        between = f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        print(
            f"{row['claim']:42} against {row['peer']:52} {row['ours']:.4g} / {row['theirs']:.4g} "
            f"{row['metric']}, ratio {row['ratio']:.3f}{between}"
        )
