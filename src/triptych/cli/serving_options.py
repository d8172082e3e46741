"""What the verbs of `--task serve` read in the same way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Concatenate

import typer

from triptych.cli.answer import Answer
from triptych.cli.inputs import read_cluster_option, read_model
from triptych.cli.options import ClusterOption, ModelArgument
from triptych.cluster.cluster import Cluster
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.engines import BY_NAME, engine_named
from triptych.errors import InputError, Problem
from triptych.model.count import parameters
from triptych.model.model import Model
from triptych.plan.serving import ServingWorkload
from triptych.units import format_bytes, format_count

RateOption = Annotated[
    float | None, typer.Option(metavar="R", help="Requests that arrive in a second.")
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Users that each wait for their answer, no rate."),
]
InputOption = Annotated[int, typer.Option("--input", min=1, metavar="N", help="Tokens a prompt.")]
OutputOption = Annotated[
    int, typer.Option("--output", min=1, metavar="N", help="Tokens an answer.")
]
TtftOption = Annotated[
    float | None, typer.Option("--slo-ttft", metavar="S", help="Most seconds to the first token.")
]
TpotOption = Annotated[
    float | None, typer.Option("--slo-tpot", metavar="S", help="Most seconds between tokens.")
]
EngineOption = Annotated[
    str, typer.Option(metavar="NAME", help="Priced as it runs under: " + ", ".join(BY_NAME) + ".")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The model, the cluster, the requests and the engine of a command line."""

    source: str  # MODEL as it was given
    model: Model
    cluster: Cluster
    workload: ServingWorkload
    engine: Engine
    engine_name: str


def asked(
    model: ModelArgument,
    cluster: ClusterOption,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    input_tokens: InputOption = 1024,
    output_tokens: OutputOption = 256,
    slo_ttft: TtftOption = None,
    slo_tpot: TpotOption = None,
    engine: EngineOption = "triptych",
) -> Asked:
    """What these options say. Raises InputError with everything that is wrong with them."""
    shape, where = read_model(model), read_cluster_option(cluster)
    return Asked(
        source=model,
        model=shape,
        cluster=where,
        workload=serving_workload(
            shape, input_tokens, output_tokens, rate, concurrency, slo_ttft, slo_tpot
        ),
        engine=engine_named(engine),
        engine_name=engine,
    )


def asking(command: Callable[Concatenate[Asked, ...], Answer]) -> Callable[..., Answer]:
    """A command whose options begin with those of `asked`, and that is called with what they say.

    Typer reads signatures, so the options stand once, in that of `asked`.
    """
    shared = inspect.signature(asked, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def run(**options: Any) -> Answer:
        said = asked(**{name: options.pop(name) for name in shared})
        return command(said, **options)

    parameters_ = [*shared.values(), *own]
    keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters_]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters_}
    return run


def serving_workload(
    model: Model,
    input_tokens: int,
    output_tokens: int,
    rate: float | None,
    concurrency: int | None,
    ttft: float | None,
    tpot: float | None,
) -> ServingWorkload:
    """The workload of some options. Raises InputError with everything that is wrong with them."""
    problems = [
        Problem(f"{name} {value:g}", "is more than 0", f"{name} 1")
        for name, value in (("--rate", rate), ("--slo-ttft", ttft), ("--slo-tpot", tpot))
        if value is not None and value <= 0
    ]
    if rate and concurrency:
        problems.append(
            Problem("--rate with --concurrency", "arrivals are one or the other", "--rate alone")
        )
    if model.learned_positions and input_tokens + output_tokens > model.max_position:
        what = f"{input_tokens} + {output_tokens} tokens for {model.name}"
        problems.append(
            Problem(what, f"it has positions up to {model.max_position}", "shorter requests")
        )
    if problems:
        raise InputError(problems)
    return ServingWorkload(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        rate=rate,
        concurrency=concurrency,
        ttft_s=ttft,
        tpot_s=tpot,
    )


def serving_headline(said: Asked) -> tuple[str, dict[str, object]]:
    """What a plan or a price is for, as text and as JSON."""
    model, cluster, workload = said.model, said.cluster, said.workload
    count = parameters(model)
    memory = format_bytes(cluster.device.memory_bytes)
    load = f"{workload.input_tokens:.0f} tokens in, {workload.output_tokens:.0f} out, "
    if workload.rate is not None:
        load += f"{workload.rate:g} requests/s"
    elif workload.concurrency is not None:
        load += f"{workload.concurrency:.0f} at once"
    else:
        load += "as many as there is room for"
    lines = [
        f"model     {model.name}: {model.num_layers} layers, {format_count(count)} parameters",
        f"cluster   {cluster.name}: {cluster.num_devices} x {cluster.device.name} of {memory}",
        f"requests  {load}, engine {said.engine_name}",
    ]
    lines += [f"unreliable: {reason}" for reason in model.unreliable]
    document: dict[str, object] = {
        "task": "serve",
        "model": model.name,
        "parameters": count,
        "cluster": cluster.name,
        "num_devices": cluster.num_devices,
        "engine": said.engine_name,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
        "rate": workload.rate,
        "concurrency": workload.concurrency,
        "slo_ttft_s": workload.ttft_s,
        "slo_tpot_s": workload.tpot_s,
        "unreliable": list(model.unreliable),
    }
    return "\n".join(lines), document
