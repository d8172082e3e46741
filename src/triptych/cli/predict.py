"""`triptych predict`: price one plan."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.exchange import ExportOption, ExportToOption, check_export, with_export
from triptych.cli.inputs import headline, read_cluster_option, read_model, training_workload
from triptych.cli.options import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
)
from triptych.cost.predict import predict as price
from triptych.export.target import Subject
from triptych.plan.rules import require_legal
from triptych.plan.toml import load_plan
from triptych.report.terminal import prediction_text


def command(
    model: ModelArgument,
    cluster: ClusterOption,
    plan: Annotated[
        str,
        typer.Option(
            metavar="PLAN", help="A plan file, or 'tp=8,pp=12,zero=1,...'.", show_default=False
        ),
    ],
    seq: SequenceOption = None,
    batch: BatchOption = None,
    export: ExportOption = None,
    export_to: ExportToOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Price one plan: step time, memory and traffic, each split into its terms."""
    check_export(export, export_to)
    shape = read_model(model)
    where = read_cluster_option(cluster)
    chosen = load_plan(plan, shape, where)
    workload = training_workload(shape, where, seq, batch)
    require_legal(chosen, shape, where, workload)
    prediction = price(shape, where, workload, chosen)
    heading, facts = headline(shape, where, workload)
    document = facts | prediction.to_json()
    text = [heading, prediction_text(document)]
    if not prediction.runnable:
        text.append("priced, not runnable: " + "; ".join(prediction.reasons))
    answer = Answer(text="\n\n".join(text), document=document)
    subject = Subject(plan=chosen, model=shape, cluster=where, workload=workload, source=model)
    return with_export(answer, subject, export, export_to, as_json)
