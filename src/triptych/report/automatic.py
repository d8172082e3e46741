"""A plan whose stages are their own: the stages, layouts of operators, what decisions save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from triptych.report.text import seconds, table

DEGREES = ("data", "tensor", "context", "expert")


def automatic_text(search: Mapping[str, Any]) -> str:
    """Stages, layouts and decisions of plan 1; empty if stages of their own were not asked for."""
    found = search.get("automatic")
    if not found or not search.get("plans"):
        return ""
    parts = (
        _stages_table(search["plans"][0]["plan"]),
        _hand_made(search["plans"][0], found),
        _decisions_table(found["decisions"]),
        _layouts_text(found["layouts"]),
    )
    return "\n\n".join(filter(None, parts))


def _stages_table(plan: Mapping[str, Any]) -> str:
    """The stages of a plan, those alike in one row."""
    rows = [_stage(index, stage) for index, stage in enumerate(plan["stages"])]
    heading = ("stage", "layers", "data", "tensor", "context", "expert", "devices")
    return "stages of plan 1:\n" + table([heading, *rows], ">>>>>><")


def _stage(index: int, stage: Mapping[str, Any]) -> tuple[str, ...]:
    layers = f"{stage['start']}..{stage['stop'] - 1}"
    devices = ranges_text(stage["devices"]) if stage["devices"] else "in rank order"
    return (str(index), layers, *(str(stage[name]) for name in DEGREES), devices)


def ranges_text(ranks: Sequence[int]) -> str:
    """Ascending numbers with runs as ranges: `0-3, 8`."""
    runs = [list(run) for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def _hand_made(best: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    hand = found["hand_made"]
    if hand is None:
        return "no plan with one set of degrees fits"
    gain = hand["step_time_s"] / best["step_time_s"] - 1
    if gain < 1e-6:
        return "no stages of their own are faster than plan 1, which has one set of degrees"
    slower = seconds(hand["step_time_s"])
    text = f"{gain:.1%} faster than the best plan with one set of degrees, which takes {slower}"
    if found["at_slowest_pace"]:
        text += (
            "\n(chosen as if every device were as slow as the slowest: with its stages placed by "
            "hand, another with one set of degrees may be closer)"
        )
    return text


def _decisions_table(decisions: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in decisions:
        saved = one["reason"] if one["saved_s"] is None else seconds(one["saved_s"])
        rows.append((one["name"], one["value"], one["instead"], saved))
    heading = ("decision", "plan 1", "instead", "saves a step")
    return table([heading, *rows], "<<<<") if rows else ""


def _layouts_text(layouts: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(_layout_text(layout) for layout in layouts if layout["axes"])


def _layout_text(layout: Mapping[str, Any]) -> str:
    """What each axis divides of each operator, neighbours that are alike in one row."""
    stages = ranges_text(layout["stages"])
    title = f"operators of layers of kind {layout['kind']} in stages {stages}: {_verdict(layout)}"
    parts = [title, _operators_table(layout, "operators")]
    if layout["best"] != layout["operators"]:
        whose = "another plan's" if layout["roles"] else "which no plan has"
        parts += [f"best for these layers alone, {whose}:", _operators_table(layout, "best")]
    return "\n".join(parts)


def _operators_table(layout: Mapping[str, Any], key: str) -> str:
    axes = [f"{axis['role']} x{axis['size']}" for axis in layout["axes"]]
    return table([("operators", *axes), *_rows(layout[key])], "<" * (1 + len(axes)))


def _rows(operators: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for modes, run in groupby(operators, key=lambda op: tuple(op["axes"])):
        names = [op["name"] for op in run]
        yield (names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}", *modes)


def _verdict(layout: Mapping[str, Any]) -> str:
    if layout["best"] == layout["operators"]:
        return "no layout is faster"
    saved_s = layout["seconds"] - layout["best_s"]
    share = saved_s / layout["seconds"]
    return f"any layout takes at most {share:.1%} or {seconds(saved_s)} a layer less"
