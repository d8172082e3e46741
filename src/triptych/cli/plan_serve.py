"""`triptych plan --task serve`: how to serve a model under latency objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer, say
from triptych.cli.exchange import ExportOption, ExportToOption, check_export, exported_with
from triptych.cli.main import VERBS
from triptych.cli.options import JsonOption
from triptych.cli.plan import ReportOption, write
from triptych.cli.serving_options import Asked, asking, serving_headline
from triptych.export.vllm_serving import ServingSubject, export_serving
from triptych.plan.serving import ServingPlan
from triptych.plan.serving_short import as_plan, read_settings
from triptych.plan.toml import plan_toml
from triptych.report.serving import serving_table
from triptych.search.serving import ServingQuestion, search_serving
from triptych.search.serving_remedy import lacks, remedies

FixOption = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V,...", help="Settings that every plan keeps: tp=8,weights=fp8."),
]
TopOption = Annotated[int, typer.Option(min=1, metavar="K", help="Plans to show.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the best layout, as TOML.")
]


@asking
def command(
    asked: Asked,
    fix: FixOption = None,
    top: TopOption = 5,
    out: OutOption = None,
    report: ReportOption = None,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Find how to serve MODEL on a cluster: degrees, replicas, batch and chunk under objectives."""
    check_export(export, export_to)
    question = ServingQuestion(
        model=asked.model,
        cluster=asked.cluster,
        workload=asked.workload,
        engine=asked.engine,
        fixed=read_settings(",".join(fix or ())),
    )
    result = search_serving(question, top)
    heading, facts = serving_headline(asked)
    document = facts | result.to_json()
    if not result.plans:
        nearest = result.nearest
        missing = [*lacks(nearest, asked.workload), *_works(question)] if nearest else []
        document["missing"] = missing
        text = "\n\n".join([heading, serving_table(document)])
        return Answer(text=text, document=document, exit_code=2)
    best = result.plans[0].prediction.plan
    document["next"] = _next_command(asked, best, out)
    if out:
        write(out, plan_toml(as_plan(best)))
    if report:
        _write_report(report, document)
    parts = [heading, serving_table(document), f"next:\n  {document['next']}"]
    answer = Answer(text="\n\n".join(parts), document=document)
    if export is None:
        return answer
    return exported_with(answer, export_serving(_subject(asked, best), export), export_to, as_json)


def _subject(asked: Asked, plan: ServingPlan) -> ServingSubject:
    return ServingSubject(
        plan=plan, model=asked.model, workload=asked.workload, source=asked.source
    )


def _next_command(asked: Asked, best: ServingPlan, out: Path | None) -> str:
    """What serves under a plan; of engines that no export is for, what prices it again."""
    if asked.engine_name == "vllm":
        lines = export_serving(_subject(asked, best), "vllm").text.splitlines()
        return "\n  ".join(line for line in lines if not line.startswith("#"))
    if asked.engine_name == "triptych" and "serve" in VERBS:
        plan = str(out) if out else as_plan(best).short()
        return f"triptych serve {asked.source} --plan {plan}"
    work = asked.workload
    words = [f"--input {work.input_tokens:.0f} --output {work.output_tokens:.0f}"]
    words += [f"--rate {work.rate:g}"] if work.rate is not None else []
    words += [f"--concurrency {work.concurrency:.0f}"] if work.concurrency is not None else []
    words += [f"--engine {asked.engine_name} --plan {best.short()}"]
    verb = f"triptych predict {asked.source} --cluster {asked.cluster.name} --task serve"
    return " ".join([verb, *words])


def _write_report(path: Path, document: dict[str, object]) -> None:
    from triptych.report.serving_page import write_serving  # loads only if it is asked for

    say(f"wrote {write_serving(document, path)}")


def _works(question: ServingQuestion) -> list[str]:
    return [f"works: {change}" for change in remedies(question)]
