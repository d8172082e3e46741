"""`triptych predict`: price one plan."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.inputs import headline, read_cluster_option, training_workload
from triptych.cli.options import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
)
from triptych.cost.predict import predict
from triptych.model.load import load_model
from triptych.plan.rules import require_legal, unrunnable
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
    as_json: JsonOption = False,
) -> Answer:
    """Price one plan: step time, memory and traffic, each split into its terms."""
    shape = load_model(model)
    where = read_cluster_option(cluster)
    chosen = load_plan(plan, shape, where)
    workload = training_workload(shape, where, seq, batch)
    require_legal(chosen, shape, where, workload)
    document = (
        headline(shape, where, workload)[1] | predict(shape, where, workload, chosen).to_json()
    )
    reasons = unrunnable(chosen, shape)
    text = [headline(shape, where, workload)[0], prediction_text(document)]
    text += ["priced, not runnable: " + "; ".join(reasons)] if reasons else []
    return Answer(text="\n\n".join(text), document=document | {"unrunnable": reasons})
