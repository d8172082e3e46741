"""`triptych validate`: predicted beside measured for a table of runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer
from triptych.cli.options import JsonOption
from triptych.errors import InputError, Problem
from triptych.report.validation import validation_text
from triptych.validate.tasks import TASKS


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV table of measured runs.")],
    task: Annotated[
        str, typer.Option(metavar="TASK", help="What the runs did: " + ", ".join(TASKS) + ".")
    ] = "train",
    rows: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write what was predicted of each row as CSV."),
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Hold the cost model against measured runs: errors by source, order of plans, fit, bars."""
    if task not in TASKS:
        raise InputError(
            Problem(f"--task {task}", "runs train or serve", "one of " + ", ".join(TASKS))
        )
    report = TASKS[task](file)
    if rows is not None:
        _write(rows, report.rows)
    return Answer(text=validation_text(report.document), document=report.document)


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for line in lines for name in line))
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise InputError(Problem(f"cannot write {path}: {error}")) from error
