"""`triptych plan`: find the fastest way to split a model over a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.exchange import (
    ExportOption,
    ExportToOption,
    FromOption,
    check_export,
    read_present,
    with_export,
    with_present,
)
from triptych.cli.inputs import headline, read_cluster_option, training_workload
from triptych.cli.options import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
)
from triptych.cluster.cluster import Cluster
from triptych.errors import InputError, Problem
from triptych.export.target import Subject
from triptych.model.load import load_model
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml
from triptych.plan.workload import Workload
from triptych.report.terminal import plans_table
from triptych.search.search import SearchResult, search
from triptych.units import format_bytes


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
        Path | None,
        typer.Option(metavar="FILE", help="Write the best plan that runs, as TOML."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML report of the plans.")
    ] = None,
    from_file: FromOption = None,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Find the fastest way to split MODEL over a cluster for training, and say why."""
    check_export(export, export_to)
    shape = load_model(model)
    where = read_cluster_option(cluster)
    fixed = fixed_settings(fix or ())
    present = read_present(from_file, shape, where, (seq, batch), fixed)
    workload = present.workload if present else training_workload(shape, where, seq, batch)
    result = search(shape, where, workload, fixed=fixed, top=top)
    heading, facts = headline(shape, where, workload)
    document = facts | result.to_json()
    if not result.plans:
        parts = [heading, plans_table(document), _what_would_fit(result)]
        answer = Answer(text="\n\n".join(parts), document=document, exit_code=2)
        return with_present(answer, present, shape, where)
    best = (result.runnable or result.plans[0]).plan
    if out:
        write(out, plan_toml(best))
    if report:
        _write_report(report, shape.name, result, document)
    command_line = _next_command(model, best, where, workload, out)
    text = [heading, plans_table(document), *_not_the_first(result), f"next:\n  {command_line}"]
    answer = Answer(text="\n\n".join(text), document=document | {"next": command_line})
    answer = with_present(answer, present, shape, where)
    subject = Subject(
        plan=result.plans[0].plan, model=shape, cluster=where, workload=workload, source=model
    )
    return with_export(answer, subject, export, export_to, as_json)


def fixed_settings(words: Sequence[str]) -> dict[str, str]:
    """`--fix tp=8,pp=4` as settings and values. Raises InputError for a word that is neither."""
    settings = {}
    for word in filter(None, ",".join(words).split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(Problem(f"--fix {word}", "settings are key=value", "--fix tp=8,pp=4"))
        settings[key.strip()] = value.strip()
    return settings


def write(path: Path, text: str) -> None:
    """Writes a file and says so. Raises InputError if its folder is not there."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(Problem(f"cannot write {path}: {error.strerror}")) from error
    say(f"wrote {path}")


def _what_would_fit(result: SearchResult) -> str:
    if result.closest is None:
        return "no plan is legal"
    near = result.closest
    lines = [
        f"closest: {near.plan.short()} needs {format_bytes(near.needed_bytes)} "
        f"({near.needed_bytes} bytes) a device, {near.over_bytes} bytes too many",
        *(f"  works: {change}" for change in near.changes),
    ]
    return "\n".join(lines)


def _not_the_first(result: SearchResult) -> list[str]:
    """Says so if the best plan is priced but cannot run today, and which one can."""
    first = result.plans[0]
    if first.prediction.runnable:
        return []
    why = "plan 1 is priced, not runnable: " + "; ".join(first.prediction.reasons)
    if result.runnable is None:
        return [f"{why}; no plan that fits runs today"]
    slower = result.runnable.prediction.step_time_s / first.prediction.step_time_s
    return [f"{why}\nbest that runs: {result.runnable.plan.short()}, {slower:.2f} x its step time"]


def _next_command(
    model: str, plan: Plan, cluster: Cluster, workload: Workload, out: Path | None
) -> str:
    """The command that trains under a plan; on several nodes it is given on each of them."""
    nodes = sum(group.nodes for group in cluster.groups)
    words = ["triptych"]
    if nodes > 1:
        words = [
            *("torchrun", f"--nnodes={nodes}", f"--nproc-per-node={cluster.devices_per_node}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "triptych"),
        ]
    words += ["train", "job.toml", "--plan", str(out) if out else plan.short(), "--set"]
    words += [f"model.path={model}"] if Path(model).exists() else []
    words += [f"data.sequence_length={workload.sequence_length}"]
    return shlex.join([*words, f"train.global_batch={workload.global_batch}"])


def _write_report(path: Path, name: str, result: SearchResult, document: Mapping[str, Any]) -> None:
    from triptych.report.html import write_report
    from triptych.report.run import Run

    first = result.plans[0]
    prediction: dict[str, Any] = first.prediction.to_json()
    if first.prediction.timeline is not None:
        prediction["timeline"] = first.prediction.timeline.to_json()
    run = Run(name=name, plan=first.plan, prediction=prediction, search=document)
    say(f"wrote {write_report(run, path)}")
