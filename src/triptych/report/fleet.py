"""Placements and simulations of fleets as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.report.text import bar, seconds, share, table


def placement_text(document: Mapping[str, Any]) -> str:
    """What `triptych place` says."""
    parts = [
        f"{len(document['groups'])} groups on {document['devices']} devices",
        groups_text(document["groups"]),
        comparison_text(document),
    ]
    if "advice" in document:
        parts.append(advice_text(document["advice"]))
    return "\n\n".join(parts)


def simulation_text(document: Mapping[str, Any]) -> str:
    """What `triptych simulate` says."""
    first = (
        f"{document['requests']} requests, {share(document['attainment'])} within their objectives"
        f" (95 %: {share(document['attainment_low'])} to {share(document['attainment_high'])})"
    )
    rows = [("model", "requests", "in time", "p50", "p99")]
    rows += [
        (
            name,
            str(each["requests"]),
            share(each["attainment"]),
            seconds(each["latency_p50_s"]),
            seconds(each["latency_p99_s"]),
        )
        for name, each in document["models"].items()
    ]
    return "\n\n".join([first, groups_text(document["groups"]), table(rows, "<>>>>")])


def groups_text(groups: list[Mapping[str, Any]]) -> str:
    """Shape, load and models of each group."""
    rows = [("group", "shape", "weights", "busy", "", "models")]
    rows += [
        (
            str(index),
            group["shape"],
            f"{group['weights_gib']:.2f} GiB",
            share(group["utilisation"]),
            f"{bar(group['utilisation'], 1.0, 12):12}",
            _shortened(group["models"]),
        )
        for index, group in enumerate(groups)
    ]
    return table(rows, ">>>><<")


def comparison_text(document: Mapping[str, Any]) -> str:
    """Attainment beside the baselines, on requests that were not planned with."""
    rows = [("policy", "in time")]
    rows += [(name, share(value)) for name, value in document["attainment"].items()]
    return table(rows, "<>")


def advice_text(advice: Mapping[str, Any]) -> str:
    """What binds, and what a change would buy."""
    lines = [
        f"one more device: {share(advice['with_one_more_device'])} in time",
        f"objectives x {advice['looser']}: {share(advice['with_looser_objectives'])} in time",
    ]
    lines += [f"{name}: {why}" for name, why in advice["limits"].items()]
    return "\n".join(lines)


def _shortened(names: list[str], width: int = 60) -> str:
    text = " ".join(names)
    return text if len(text) <= width else text[: width - 4].rsplit(" ", 1)[0] + " ..."
