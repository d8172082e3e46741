"""What the clients of a server saw, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.report.text import number, seconds, share, table


def load_text(document: Mapping[str, Any]) -> str:
    """What `triptych bench-serve` says: latencies by percentile, each with its 95 % interval."""
    heading = f"{document['requests']} requests in {seconds(document['duration_s'])}"
    heading += f" to {document['model']}"
    for word in ("refused", "failed"):
        if document[word]:
            heading += f", {document[word]} {word}"
    rows: list[tuple[str, ...]] = [("", "p50", "p90", "p99")]
    rows += [
        (name.upper(), *(_interval(document[f"{name}_s"][f"p{q}"]) for q in (50, 90, 99)))
        for name in ("ttft", "tpot", "latency")
    ]
    lines = [
        f"answers     {number(document['output_tokens_per_s'])} tokens/s, prompts "
        f"{number(document['prompt_tokens_per_s'])} tokens/s",
        f"goodput     {number(document['goodput_per_s'])} requests/s within the objectives: "
        f"{share(document['attainment'])} of all",
    ]
    if document["lag_s"] > 0.05:
        lines.append(f"the latest request was sent {seconds(document['lag_s'])} late: this client")
        lines.append("was the limit; send from a machine of its own or at a lower rate")
    lines += [f"failed: {fault}" for fault in document["faults"]]
    return "\n\n".join([heading, table(rows, "<>>>"), "\n".join(lines)])


def _interval(estimate: Mapping[str, float | None]) -> str:
    value, low, high = (seconds(estimate[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
