"""`triptych report`: a run folder as an HTML page and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.options import JsonOption
from triptych.report.html import write_report
from triptych.report.run import read_run
from triptych.report.terminal import run_text


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder that `triptych train` wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; default: report.html in the run folder."),
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Draw a run: plan, memory by term, loss curve, predicted beside recorded pipeline."""
    run = read_run(folder)
    page = write_report(run, out or folder / "report.html")
    return Answer(text=f"{run_text(run)}\n\nwrote {page}", document={"report": str(page)})
