"""Why a search answered as it did: what binds, what else there is, what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from triptych.report.text import gib, seconds, table
from triptych.units import format_bytes


def explanation(search: Mapping[str, Any]) -> str:
    """What binds the best plan, the Pareto front and the sensitivity, as far as they are there."""
    parts = (_binding(search), front_table(search), sensitivity_table(search))
    return "\n\n".join(filter(None, parts))


def _binding(search: Mapping[str, Any]) -> str:
    lines = "\n".join(f"  {text}" for text in search.get("binding") or ())
    parts = [f"what binds plan 1:\n{lines}"] if lines else []
    return "\n".join([*parts, *filter(None, [zero_text(search)])])


def zero_text(search: Mapping[str, Any]) -> str:
    """What a rank of the best plan sends over its data axis under each stage of ZeRO."""
    sent = search.get("zero_bytes") or {}
    each = ", ".join(f"ZeRO-{stage} {format_bytes(size)}" for stage, size in sent.items())
    return f"a rank of plan 1 sends over the data axis in a step: {each}" if each else ""


SAVES = 0.04
"""Share of the memory that a plan of the front saves against the last one shown, to be shown."""


def front_table(search: Mapping[str, Any]) -> str:
    """Plans than which none is both faster and smaller."""
    rows = list(front_rows(search))
    if not rows:
        return ""
    title = (
        "none is both faster and smaller than one of these (up to 25 % slower than the best; of "
        "plans\nthat need nearly as much memory the fastest):"
    )
    return title + "\n" + table([("step", "memory", "plan"), *rows], ">><")


def front_rows(search: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Step time, memory and name of the plans of the front, those that save little left out."""
    shown_gib = float("inf")
    for plan in search.get("front") or ():
        if plan["peak_memory_gib"] <= (1 - SAVES) * shown_gib:
            shown_gib = plan["peak_memory_gib"]
            yield seconds(plan["step_time_s"]), gib(shown_gib), plan["plan"]


def sensitivity_table(search: Mapping[str, Any]) -> str:
    """The best step after each change, and whether another plan is the best then."""
    rows = list(sensitivity_rows(search))
    return table([("if", "step", "tokens/s", "plan then"), *rows], "<>><") if rows else ""


def sensitivity_rows(search: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Change, step time, speed against the present best, what becomes of the choice."""
    for effect in search.get("sensitivity") or ():
        if effect["plan"] is None:
            yield effect["change"], "-", "-", "no plan fits"
            continue
        then = "the same"
        if not effect["is_same"]:
            kept = effect["kept_step_time_s"]
            now = "the present one does not work" if kept is None else f"kept: {seconds(kept)}"
            then = f"{effect['plan']} ({now})"
        speed = f"x{effect['speed']:.2f}"
        yield effect["change"], seconds(effect["step_time_s"]), speed, then
