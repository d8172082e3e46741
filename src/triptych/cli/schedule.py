"""`triptych schedule`: print, check and draw a pipeline program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.options import JsonOption
from triptych.schedule.action import Action, Kind
from triptych.schedule.check import check
from triptych.schedule.draw import draw_text
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.program import Program
from triptych.schedule.simulate import peak_in_flight, simulate
from triptych.schedule.svg import svg
from triptych.schedule.timeline import Timeline


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of " + ", ".join(SCHEDULES))],
    stages: Annotated[int, typer.Option(help="Pipeline ranks.", show_default=False)],
    microbatches: Annotated[int, typer.Option(help="Micro-batches a step.", show_default=False)],
    chunks: Annotated[int, typer.Option(help="Stages that one rank runs.")] = 1,
    svg_path: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into this file.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Print, check and draw a pipeline program; a forward takes one unit, a backward two."""
    program = build_program(name, stages, microbatches, chunks)
    complete = with_communication(program)
    check(complete)
    timeline = simulate(complete, _unit_s, None)
    if svg_path:
        title = f"{name}, {stages} stages, {microbatches} micro-batches"
        svg_path.write_text(svg(timeline, title), encoding="utf-8")
    return Answer(
        text=_text(program, timeline, svg_path), document=_document(program, complete, timeline)
    )


def _unit_s(action: Action) -> float:
    return {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}.get(action.kind, 0.0)


def _text(program: Program, timeline: Timeline, svg_path: Path | None) -> str:
    peaks = ", ".join(map(str, peak_in_flight(program)))
    lines = [
        str(program),
        "",
        draw_text(timeline),
        "",
        "legal: every action in order, every message matched, no deadlock with unbuffered sends",
        f"bubble: {timeline.bubble_fraction:.1%} of the step",
        f"micro-batches held at once, by rank: {peaks}",
    ]
    return "\n".join([*lines, *([f"drawn in {svg_path}"] if svg_path else [])])


def _document(program: Program, complete: Program, timeline: Timeline) -> dict[str, object]:
    return {
        "name": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "actions": [[str(action) for action in row] for row in program.actions],
        "actions_with_communication": [[str(action) for action in row] for row in complete.actions],
        "bubble_fraction": timeline.bubble_fraction,
        "peak_in_flight": list(peak_in_flight(program)),
        "timeline": timeline.to_json(),
    }
