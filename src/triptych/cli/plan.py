"""`triptych plan`: find the fastest way to split a model over a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
from triptych.cli.inputs import headline, read_cluster_option, read_model, training_workload
from triptych.cli.options import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
)
from triptych.cli.prices import check_objective, price_of, read_prices
from triptych.cli.sweep import sweep as sweep_of
from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict
from triptych.cost.ranks import memory_by_rank_gib
from triptych.cost.uncertainty import MEMORY_SPARE
from triptych.errors import InputError, Problem
from triptych.export.target import Subject
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_toml
from triptych.plan.workload import Workload
from triptych.report.automatic import automatic_text
from triptych.report.explain import explanation
from triptych.report.terminal import plans_table
from triptych.search.inter.rounds import unsupported
from triptych.search.objective import Objective
from triptych.search.pins import Pins
from triptych.search.result import SearchResult
from triptych.search.search import Question, answer
from triptych.search.sensitivity import Effect
from triptych.search.sensitivity import sensitivity as effects_of
from triptych.search.sweep import read_sweep
from triptych.units import format_bytes

T = TypeVar("T")


FixOption = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V,...", help="Settings that every plan keeps: tp=8,pp=4."),
]
AutoOption = Annotated[
    bool,
    typer.Option("--auto", help="Stages of their own too; always for clusters of several kinds."),
]
ObjectiveOption = Annotated[
    str, typer.Option(metavar="NAME", help="time, memory, gpu-hours or money.")
]
PriceOption = Annotated[
    str | None,
    typer.Option(metavar="P", help="Of a device for an hour: 2.50, or H100-SXM=2.50,L40S=0.80."),
]
SpareOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="%", help="Of the peak to leave free; default: its error bar."),
]
TopOption = Annotated[int, typer.Option(min=1, metavar="K", help="Plans to show.")]
FrontOption = Annotated[
    bool, typer.Option("--front", help="Also plans that need less memory, by time.")
]
SensitivityOption = Annotated[
    bool, typer.Option("--sensitivity", help="Also other bandwidth, memory and batch.")
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V,V", help="A table over gpus=, device=, seq=, batch=."),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the best plan that runs, as TOML.")
]
ReportOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML report of the plans.")
]


def command(
    model: ModelArgument,
    cluster: ClusterOption,
    seq: SequenceOption = None,
    batch: BatchOption = None,
    fix: FixOption = None,
    auto: AutoOption = False,
    objective: ObjectiveOption = "time",
    price: PriceOption = None,
    spare: SpareOption = None,
    top: TopOption = 5,
    front: FrontOption = False,
    sensitivity: SensitivityOption = False,
    sweep: SweepOption = None,
    out: OutOption = None,
    report: ReportOption = None,
    from_file: FromOption = None,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Find the best way to split MODEL over a cluster for training, and say why."""
    part = MEMORY_SPARE if spare is None else spare / 100
    settings, grid, prices = _read_words(fix or (), sweep or (), objective, price)
    check_export(export, export_to)
    shape = read_model(model)
    where = read_cluster_option(cluster)
    goal = Objective(name=objective, price=price_of(prices, where))
    if grid:
        return sweep_of(
            shape,
            where,
            seq,
            batch,
            grid=grid,
            fixed=settings,
            objective=goal,
            spare=part,
            price_of=lambda there: price_of(prices, there),
            report=report,
        )
    present = read_present(from_file, shape, where, (seq, batch), settings)
    workload = present.workload if present else training_workload(shape, where, seq, batch)
    asked: dict[str, Any] = {"pins": Pins.read(settings), "objective": goal, "spare": part}
    question = Question(model=shape, cluster=where, workload=workload, **asked)
    result = _result(question, top, front or report is not None, auto)
    effects = _effects(question, result) if sensitivity or report else ()
    said = _said(model, question, result, effects, out)
    _write_files(question, result, said, out, report)
    said = with_present(said, present, shape, where)
    if not result.plans:
        return said
    best = result.plans[0].plan
    subject = Subject(plan=best, model=shape, cluster=where, workload=workload, source=model)
    return with_export(said, subject, export, export_to, as_json)


def _write_files(
    question: Question,
    result: SearchResult,
    said: Answer,
    out: Path | None,
    report: Path | None,
) -> None:
    """The plan and the page that were asked for, if there is a plan."""
    if result.plans and out:
        write(out, plan_toml((result.runnable or result.plans[0]).plan))
    if result.plans and report:
        _write_report(report, question, result, said.document or {})


def _result(question: Question, top: int, with_front: bool, auto: bool) -> SearchResult:
    """The answer, with stages of their own if they are wanted: that loads the solvers."""
    if not (auto or _wants_stages(question)):
        return answer(question, top=top, with_front=with_front)
    from triptych.search.automatic import answer_automatic

    return answer_automatic(question, top=top, with_front=with_front)


def _wants_stages(question: Question) -> bool:
    """True on clusters of several kinds of nodes, unless what is asked leaves stages no choice."""
    is_mixed = len(question.cluster.groups) > 1
    return is_mixed and not question.objective.is_memory and not unsupported(question.pins)


def _said(
    model: str,
    question: Question,
    result: SearchResult,
    effects: Sequence[Effect],
    out: Path | None,
) -> Answer:
    """The answer of a search as text and as a document."""
    heading, facts = headline(question.model, question.cluster, question.workload)
    document = facts | result.to_json() | {"sensitivity": [effect.to_json() for effect in effects]}
    if not result.plans:
        parts = [heading, plans_table(document), _what_would_fit(result)]
        return Answer(text="\n\n".join(parts), document=document, exit_code=2)
    best = (result.runnable or result.plans[0]).plan
    command_line = _next_command(model, best, question.cluster, question.workload, out)
    text = [heading, plans_table(document), automatic_text(document), explanation(document)]
    text += _not_the_first(result)
    file = "  (PLAN.toml as --out writes it)" if "PLAN.toml" in command_line else ""
    text.append(f"next:{file}\n  {command_line}")
    return Answer(text="\n\n".join(filter(None, text)), document=document | {"next": command_line})


def _read_words(
    fix: Sequence[str], sweep: Sequence[str], objective: str, price: str | None
) -> tuple[dict[str, str], dict[str, list[str]], Mapping[str, float]]:
    """Pins, sweep and prices. Raises InputError with everything that is wrong with any of them."""
    problems: list[Problem] = []

    def read(reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except InputError as error:
            problems.extend(error.problems)
            return otherwise

    settings: dict[str, str] = read(lambda: fixed_settings(fix), {})
    readable = fixed_settings([word for word in ",".join(fix).split(",") if "=" in word])
    read(lambda: Pins.read(readable), Pins(values={}))
    grid: dict[str, list[str]] = read(lambda: read_sweep(sweep), {})
    prices: dict[str, float] = read(lambda: read_prices(price), {})
    read(lambda: check_objective(objective, prices, price), None)
    if problems:
        raise InputError(problems)
    return settings, grid, prices


def _effects(question: Question, result: SearchResult) -> tuple[Effect, ...]:
    if not result.plans:
        return ()
    best = result.plans[0]
    return effects_of(question, best.plan, best.prediction.step_time_s)


def fixed_settings(words: Sequence[str]) -> dict[str, str]:
    """`--fix tp=8,pp=4` as settings and values. Raises InputError for a word that is neither."""
    settings, problems = {}, []
    for word in filter(None, ",".join(words).split(",")):
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(Problem(f"--fix {word}", "settings are key=value", "--fix tp=8,pp=4"))
        settings[key.strip()] = value.strip()
    if problems:
        raise InputError(problems)
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
    """The command that trains under a plan; on several nodes it is given on each of them.

    Devices of stages have no short form: such a plan goes through a file.
    """
    listed = any(stage.devices for stage in plan.stages)
    text = str(out) if out else "PLAN.toml" if listed else plan.short()
    nodes = sum(group.nodes for group in cluster.groups)
    words = ["triptych"]
    if nodes > 1:
        words = [
            *("torchrun", f"--nnodes={nodes}", f"--nproc-per-node={cluster.devices_per_node}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "triptych"),
        ]
    words += ["train", "job.toml", "--plan", text, "--set"]
    words += [f"model.path={model}"] if Path(model).exists() else []
    words += [f"data.sequence_length={workload.sequence_length}"]
    return shlex.join([*words, f"train.global_batch={workload.global_batch}"])


def _write_report(
    path: Path, question: Question, result: SearchResult, document: Mapping[str, Any]
) -> None:
    from triptych.report.html import write_report
    from triptych.report.run import Run

    first, asked = result.plans[0], (question.model, question.cluster, question.workload)
    priced = predict(*asked, first.plan)
    prediction: dict[str, Any] = priced.to_json()
    prediction["memory_by_rank_gib"] = memory_by_rank_gib(*asked, first.plan)
    if priced.timeline is not None:
        prediction["timeline"] = priced.timeline.to_json()
    run = Run(name=question.model.name, plan=first.plan, prediction=prediction, search=document)
    say(f"wrote {write_report(run, path)}")
