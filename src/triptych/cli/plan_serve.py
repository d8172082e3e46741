"""`triptych plan --task serve`: how to serve a model under latency objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.inputs import read_cluster_option
from triptych.cli.options import ClusterOption, JsonOption, ModelArgument
from triptych.cli.plan import write
from triptych.cli.serving_options import (
    ConcurrencyOption,
    EngineOption,
    InputOption,
    OutputOption,
    RateOption,
    TpotOption,
    TtftOption,
    engine_named,
    serving_headline,
    serving_workload,
)
from triptych.model.load import load_model
from triptych.plan.serving_short import as_plan, read_settings
from triptych.plan.toml import plan_toml
from triptych.report.serving import serving_table
from triptych.search.serving import ServingQuestion, search_serving
from triptych.search.serving_remedy import lacks, remedies


def command(
    model: ModelArgument,
    cluster: ClusterOption,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    input_tokens: InputOption = 1024,
    output_tokens: OutputOption = 256,
    slo_ttft: TtftOption = None,
    slo_tpot: TpotOption = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V,...", help="Settings that every plan keeps: tp=8,weights=fp8."),
    ] = None,
    engine: EngineOption = "triptych",
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Plans to show.")] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best layout, as TOML.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Find how to serve MODEL on a cluster: degrees, replicas, batch and chunk under objectives."""
    shape, where = load_model(model), read_cluster_option(cluster)
    workload = serving_workload(
        shape, input_tokens, output_tokens, rate, concurrency, slo_ttft, slo_tpot
    )
    question = ServingQuestion(
        model=shape,
        cluster=where,
        workload=workload,
        engine=engine_named(engine),
        fixed=read_settings(",".join(fix or ())),
    )
    result = search_serving(question, top)
    heading, facts = serving_headline(shape, where, workload, engine)
    document = facts | result.to_json()
    if not result.plans:
        nearest = result.nearest
        missing = [*lacks(nearest, workload), *_works(question)] if nearest else []
        document["missing"] = missing
        text = "\n\n".join([heading, serving_table(document)])
        return Answer(text=text, document=document, exit_code=2)
    if out:
        write(out, plan_toml(as_plan(result.plans[0].prediction.plan)))
    return Answer(text="\n\n".join([heading, serving_table(document)]), document=document)


def _works(question: ServingQuestion) -> list[str]:
    return [f"works: {change}" for change in remedies(question)]
