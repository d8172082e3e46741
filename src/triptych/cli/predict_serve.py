"""`triptych predict --task serve`: price one serving plan."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.exchange import ExportOption, ExportToOption, check_export, exported_with
from triptych.cli.options import JsonOption
from triptych.cli.serving_options import Asked, asking, serving_headline
from triptych.cost.serving.predict import predict_serving
from triptych.export.vllm_serving import ServingSubject, export_serving
from triptych.plan.serving_short import parse_serving_plan
from triptych.report.serving import serving_text

PlanOption = Annotated[
    str,
    typer.Option(metavar="PLAN", help="'tp=4,pp=2,batch=128,chunk=4096,...'.", show_default=False),
]


@asking
def command(
    asked: Asked,
    plan: PlanOption,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Price one serving plan: latencies, throughput, room for keys and values."""
    check_export(export, export_to)
    engine, shape = asked.engine, asked.model
    chosen = parse_serving_plan(
        plan, shape, asked.cluster, batch=engine.max_batch, chunk=engine.chunk_tokens
    )
    prediction = predict_serving(shape, asked.cluster, asked.workload, chosen, engine)
    heading, facts = serving_headline(asked)
    document = facts | prediction.to_json()
    answer = Answer(text=f"{heading}\n\n{serving_text(document)}", document=document)
    if export is None:
        return answer
    subject = ServingSubject(plan=chosen, model=shape, workload=asked.workload, source=asked.source)
    return exported_with(answer, export_serving(subject, export), export_to, as_json)
