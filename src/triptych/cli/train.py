"""`triptych train`: train a model as a job file says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption
from triptych.report.compare import comparisons
from triptych.report.run import read_run
from triptych.report.terminal import comparison_table

if TYPE_CHECKING:
    from triptych.api import TrainResult


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, see docs/job.md.")],
    plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="auto, a plan file, or 'tp=2,pp=2,...'."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: train.steps=100."),
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Train as JOB says, on this machine or as a rank of torchrun or Slurm; resume if it can."""
    say(f"reading {job} ...")
    from triptych.api import train

    changes = [*(overrides or ()), *([f"parallel.plan={plan}"] if plan else ())]
    result = train(job, changes)
    return Answer() if result is None else _answer(result)


def _answer(result: TrainResult) -> Answer:
    from triptych.train.stop import EXIT_CODE

    lines = [f"run folder {result.folder}, plan {result.plan.short()}, step {result.step}"]
    if result.stopped_by:
        lines[0] += f": ended by {result.stopped_by}; the same command goes on"
    losses = {"loss": result.loss, "held-out loss": result.eval_loss}
    lines += [f"{name} {value:.4f}" for name, value in losses.items() if value is not None]
    lines += [f"checkpoint {result.checkpoint}"] if result.checkpoint else []
    run = read_run(result.folder)
    lines += ["", comparison_table(run)] if run.steps else []
    document = {
        "folder": str(result.folder),
        "plan": result.plan.short(),
        "step": result.step,
        "loss": result.loss,
        "eval_loss": result.eval_loss,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "comparison": [asdict(row) for row in comparisons(run)],
        "stopped_by": result.stopped_by,
    }
    code = EXIT_CODE if result.stopped_by else 0
    return Answer(text="\n".join(lines), document=document, exit_code=code)
