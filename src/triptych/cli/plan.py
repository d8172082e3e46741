"""`triptych plan`: find the fastest way to split a model over a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.inputs import headline, read_cluster_option, training_workload
from triptych.cli.options import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
)
from triptych.model.load import load_model
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable
from triptych.plan.short import read_words
from triptych.plan.toml import plan_toml
from triptych.plan.workload import Workload
from triptych.report.terminal import plans_table
from triptych.search.search import SearchResult, search


def command(
    model: ModelArgument,
    cluster: ClusterOption,
    seq: SequenceOption = None,
    batch: BatchOption = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V,...", help="Settings that every plan keeps: tp=8,pp=4."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Plans to show.")] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best plan as TOML.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML report of the plans.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Find the fastest way to split MODEL over a cluster for training, and say why."""
    shape = load_model(model)
    fixed = fixed_settings(fix or ())
    where = read_cluster_option(cluster)
    workload = training_workload(shape, where, seq, batch)
    result = search(shape, where, workload, fixed=fixed, top=top)
    document = headline(shape, where, workload)[1] | result.to_json()
    if not result.plans:
        return Answer(text=_nothing(result), document=document, exit_code=2)
    if out:
        out.write_text(plan_toml(result.plans[0].plan), encoding="utf-8")
        say(f"wrote {out}")
    next_command = _next_command(model, result.plans[0].plan, workload, out)
    text = [headline(shape, where, workload)[0], plans_table(document)]
    text += _cannot_run(result, shape)
    text += [f"next:\n  {next_command}"]
    return Answer(text="\n\n".join(text), document=document | {"next": next_command})


def fixed_settings(words: Sequence[str]) -> Mapping[str, str]:
    """`--fix tp=8,pp=4` as settings by their full names. Raises PlanError for unknown ones."""
    values = read_words(",".join(words))
    return {
        key: "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in values.items()
    }


def _next_command(model: str, plan: Plan, workload: Workload, out: Path | None) -> str:
    words = ["triptych", "train", "job.toml", "--plan", str(out) if out else plan.short(), "--set"]
    words += [f"model.path={model}"] if Path(model).exists() else []
    words += [f"data.sequence_length={workload.sequence_length}"]
    return shlex.join([*words, f"train.global_batch={workload.global_batch}"])


def _cannot_run(result: SearchResult, model: Model) -> list[str]:
    """What keeps the best plan from running here today, if anything."""
    reasons = unrunnable(result.plans[0].plan, model)
    return ["priced, not runnable: " + "; ".join(reasons)] if reasons else []
