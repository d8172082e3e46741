"""`triptych schedule`: print, check and draw a pipeline program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.options import JsonOption
from triptych.schedule.action import Kind
from triptych.schedule.check import check
from triptych.schedule.draw import draw_text
from triptych.schedule.generate import build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.program import Program
from triptych.schedule.simulate import peak_held, peak_in_flight, simulate
from triptych.schedule.svg import svg
from triptych.schedule.timeline import Timeline
from triptych.schedule.traits import SCHEDULES, TRAITS


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of " + ", ".join(SCHEDULES))],
    stages: Annotated[int, typer.Option(help="Pipeline ranks.", show_default=False)],
    microbatches: Annotated[int, typer.Option(help="Micro-batches a step.", show_default=False)],
    chunks: Annotated[
        int | None,
        typer.Option(help="Stages that one rank runs; as few as the schedule has if not given."),
    ] = None,
    svg_path: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into this file.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Print, check and draw a pipeline program; a forward takes one unit, a backward two.

    The units are those of all chunks of a rank together; each half of a split backward takes one.
    """
    if chunks is None:
        chunks = TRAITS[name].least_chunks if name in TRAITS else 1
    program = build_program(name, stages, microbatches, chunks)
    complete = with_communication(program)
    check(complete)
    timeline = simulate(program, lambda action: _UNITS[action.kind] / chunks)
    if svg_path:
        title = f"{name}, {stages} pipeline ranks, {microbatches} micro-batches"
        title += f", {chunks} chunks a rank" if chunks > 1 else ""
        svg_path.write_text(svg(timeline, title), encoding="utf-8")
    return Answer(
        text=_text(program, timeline, svg_path), document=_document(program, complete, timeline)
    )


_UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def _text(program: Program, timeline: Timeline, svg_path: Path | None) -> str:
    lines = [
        str(program),
        "",
        draw_text(timeline),
        "",
        "legal: every action in order, every message matched, no deadlock with unbuffered sends",
        f"bubble: {timeline.bubble_fraction:.1%} of the step",
        *_inside_spans(timeline),
        *_peaks(program),
    ]
    return "\n".join([*lines, *([f"drawn in {svg_path}"] if svg_path else [])])


def _inside_spans(timeline: Timeline) -> list[str]:
    """What is left of the bubble where ranks need not end the step together."""
    inside = timeline.bubble_inside_spans
    if inside > timeline.bubble_fraction - 0.0005:
        return []
    return [f"  {inside:.1%} between the first and the last action of the busiest rank"]


def _peaks(program: Program) -> list[str]:
    unit = "micro-batches" if program.num_stages == program.num_ranks else "chunks of micro-batches"
    in_flight = ", ".join(map(str, peak_in_flight(program)))
    lines = [f"{unit} held at once, by rank: {in_flight}"]
    if TRAITS[program.name].splits_backward:
        held = ", ".join(f"{count:g}" for count in peak_held(program))
        lines.append(f"  with those that wait for their weight gradients: {held}")
    return lines


def _document(program: Program, complete: Program, timeline: Timeline) -> dict[str, object]:
    return {
        "name": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "actions": [[str(action) for action in row] for row in program.actions],
        "actions_with_communication": [[str(action) for action in row] for row in complete.actions],
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_inside_spans": timeline.bubble_inside_spans,
        "peak_in_flight": list(peak_in_flight(program)),
        "peak_held": list(peak_held(program)),
        "timeline": timeline.to_json(),
    }
