"""`triptych predict --task serve`: price one serving plan."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli.answer import Answer
from triptych.cli.inputs import read_cluster_option
from triptych.cli.options import ClusterOption, JsonOption, ModelArgument
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
from triptych.cost.serving.predict import predict_serving
from triptych.model.load import load_model
from triptych.plan.serving_short import parse_serving_plan
from triptych.report.serving import serving_text


def command(
    model: ModelArgument,
    cluster: ClusterOption,
    plan: Annotated[
        str,
        typer.Option(
            metavar="PLAN", help="'tp=4,pp=2,batch=128,chunk=4096,...'.", show_default=False
        ),
    ],
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    input_tokens: InputOption = 1024,
    output_tokens: OutputOption = 256,
    slo_ttft: TtftOption = None,
    slo_tpot: TpotOption = None,
    engine: EngineOption = "triptych",
    as_json: JsonOption = False,
) -> Answer:
    """Price one serving plan: latencies, throughput, room for keys and values."""
    shape, where = load_model(model), read_cluster_option(cluster)
    described = engine_named(engine)
    workload = serving_workload(
        shape, input_tokens, output_tokens, rate, concurrency, slo_ttft, slo_tpot
    )
    chosen = parse_serving_plan(
        plan, shape, where, batch=described.max_batch, chunk=described.chunk_tokens
    )
    prediction = predict_serving(shape, where, workload, chosen, described)
    heading, facts = serving_headline(shape, where, workload, engine)
    document = facts | prediction.to_json()
    return Answer(text=f"{heading}\n\n{serving_text(document)}", document=document)
