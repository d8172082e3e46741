"""`triptych bench-serve`: load on an OpenAI-compatible server, and what its clients saw."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from triptych.cli.answer import Answer, say
from triptych.cli.options import JsonOption
from triptych.errors import InputError, Problem
from triptych.report.load import load_text
from triptych.serve.core.request import LatencyClass, State
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.metrics import Estimate, summarize
from triptych.simulate.trace import Trace, fixed_lengths, make, read_trace

if TYPE_CHECKING:
    from triptych.serve.load.replay import Outcome
    from triptych.simulate.replica import Record

_SHOWN_FAULTS = 5


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the interface, with /v1.")] = (
        "http://127.0.0.1:8000/v1"
    ),
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A CSV trace (Azure, Mooncake).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; a trace is stretched to it.")
    ] = None,
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness of drawn arrivals; 1 is Poisson.")
    ] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="The first so many.")] = 100,
    input_tokens: Annotated[
        int, typer.Option("--input", min=1, help="Prompt tokens; of a trace: at most.")
    ] = 256,
    output_tokens: Annotated[
        int, typer.Option("--output", min=1, help="Answer tokens; of a trace: at most.")
    ] = 64,
    model: Annotated[str | None, typer.Option(help="Default: the first that is listed.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TRIPTYCH_API_KEY")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Objective in seconds.")] = math.inf,
    slo_tpot: Annotated[float, typer.Option(help="Objective in seconds.")] = math.inf,
    token_ids: Annotated[
        tuple[int, int], typer.Option(metavar="LOW HIGH", help="Prompts are drawn from these.")
    ] = (100, 1000),
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers of full length, where the server knows the key.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    as_json: JsonOption = False,
) -> Answer:
    """Send requests to the server at URL at the times of a trace or a Gamma process; print TTFT,
    TPOT and goodput as clients saw them.
    """
    rng = np.random.default_rng(seed)
    load = _load(trace, rate, cv, requests, (input_tokens, output_tokens), rng)
    if not 0 <= token_ids[0] < token_ids[1]:
        raise InputError(Problem(f"--token-ids {token_ids}", works="two ids, the smaller first"))
    say(f"sending {len(load)} requests, {load.rate_per_s:.3g} a second ...")
    from triptych.serve.load.replay import Target, random_prompts, replay

    target = Target(url=url, model=model, api_key=api_key)
    prompts = list(random_prompts(load, token_ids, rng))
    extra = {"temperature": 0, **({"ignore_eos": True} if ignore_eos else {})}
    outcome = asyncio.run(replay(target, load, prompts, extra, _counter(len(load))))
    document = _document(outcome, LatencyClass(ttft_s=slo_ttft, tpot_s=slo_tpot))
    return Answer(text=load_text(document), document=document)


def _load(
    trace: Path | None,
    rate: float | None,
    cv: float,
    count: int,
    lengths: tuple[int, int],
    rng: np.random.Generator,
) -> Trace:
    """The requests to send. Raises InputError for what is none."""
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise InputError(Problem(f"--rate {rate}", works="above 0"))
    if trace is not None:
        found = read_trace(trace).head(count).capped(*lengths)
        return found if rate is None or len(found) < 2 else found.at_rate(rate)
    if rate is None:
        works = "--trace FILE, or --rate R with --cv, --input and --output"
        raise InputError(Problem("neither a trace nor a rate", works=works))
    duration_s, arrival_s = count / rate, np.empty(0)
    while len(arrival_s) < count:
        duration_s *= 2
        arrival_s = draw([Window(duration_s, rate, cv)], rng)
    return make(arrival_s[:count], fixed_lengths(*lengths), rng)


def _counter(total: int) -> Callable[[Record], None]:
    """Shows on a terminal how many requests have ended."""
    ended = 0

    def count(_: Record) -> None:
        nonlocal ended
        ended += 1
        if sys.stderr.isatty():
            print(f"\r{ended} of {total}", end="\n" if ended == total else "", file=sys.stderr)

    return count


def _document(outcome: Outcome, latency: LatencyClass) -> dict[str, Any]:
    records = outcome.records
    summary = summarize(records, {latency.name: latency})
    done = [record for record in records if record.state is State.FINISHED]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    return {
        "model": outcome.model,
        "requests": len(records),
        "refused": summary.num_refused,
        "failed": len(records) - len(done) - summary.num_refused,
        "duration_s": summary.duration_s,
        "attainment": summary.attainment.value,
        "goodput_per_s": summary.goodput_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "prompt_tokens_per_s": prompt_tokens / summary.duration_s,
        "ttft_s": _percentiles(summary.ttft_s),
        "tpot_s": _percentiles(summary.tpot_s),
        "latency_s": _percentiles(summary.latency_s),
        "lag_s": outcome.lag_s,
        "faults": outcome.faults[:_SHOWN_FAULTS],
    }


def _percentiles(found: dict[int, Estimate]) -> dict[str, dict[str, float | None]]:
    """By name, with intervals; None where nothing was measured."""
    return {
        f"p{q}": {
            key: value if math.isfinite(value) else None
            for key, value in estimate._asdict().items()
        }
        for q, estimate in found.items()
    }
