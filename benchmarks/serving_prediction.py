"""What the planner and the simulator foretell of a served trace, beside what the engine does.

The model of a folder on this machine (one device of the cluster `local` a rank), the Azure
conversation trace with its lengths cut to fit, at `--load` of what the engine gets through when all
requests come at once. Steps are priced by the serving cost model from the rates that `local` has
measured, which knows nothing of this engine's runs; the simulator then runs the same requests.
The engine takes them from one thread at their times, without HTTP. A second simulation has prices
learnt from the steps of a warm-up run, as the router of a fleet learns them.

    python examples/smollm2/unpack.py smollm2
    python benchmarks/serving_prediction.py smollm2 AzureLLMInferenceTrace2023_conv.csv
        [--plan tp=2] [--requests 300] [--load 0.7] [--json]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from sides.rows import show
from triptych.cluster.text import parse_cluster
from triptych.cost.serving.engine import TRIPTYCH
from triptych.cost.serving.layout import layout
from triptych.cost.serving.step import Stepper
from triptych.fleet.shared import RowCost
from triptych.plan.plan import Plan, Precision, even_split
from triptych.plan.serving import ServingPlan
from triptych.plan.short import read_words
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepTimes
from triptych.serve.core.request import State
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.values import Ask
from triptych.simulate.priced import PricedSteps
from triptych.simulate.replica import Record, Replica, StepCost
from triptych.simulate.run import simulate
from triptych.simulate.trace import Trace, read_trace

INPUT, OUTPUT = 512, 64
SETTINGS = EngineSettings(context=INPUT + OUTPUT, max_running=64, prefix_reuse=False)
QUANTILES = (50, 90, 99)
TOKEN_IDS = (100, 1000)


class Ran(NamedTuple):
    """What became of the requests, and the prices of steps that were seen."""

    records: list[Record]
    times: StepTimes
    seconds: float


def run(engine: Engine, trace: Trace, seed: int) -> Ran:
    """Serves a trace in this thread: requests come between steps, at their times or later."""
    draws, times = np.random.default_rng(seed), StepTimes()
    prompts = [draws.integers(*TOKEN_IDS, n).tolist() for n in trace.prompt_tokens.tolist()]
    records: dict[int, Record] = {}
    begun_s = time.perf_counter()
    coming = 0
    while coming < len(trace) or engine.is_busy:
        now_s = time.perf_counter() - begun_s
        while coming < len(trace) and trace.arrival_s[coming] <= now_s:
            records[coming] = _sent(engine, trace, prompts[coming], coming)
            coming += 1
        if not engine.is_busy:
            time.sleep(max(0.0, trace.arrival_s[coming] - (time.perf_counter() - begun_s)))
            continue
        wait_s = trace.arrival_s[coming] - now_s if coming < len(trace) else 1.0
        for output in engine.step(max(0.0, wait_s)):
            _note(records[output.request_id], time.perf_counter() - begun_s, output.finish)
        for took in engine.took():
            times.saw(*took)
    return Ran([records[i] for i in range(len(trace))], times, time.perf_counter() - begun_s)


def _sent(engine: Engine, trace: Trace, prompt: list[int], number: int) -> Record:
    wanted = int(trace.output_tokens[number])
    sampling = Sampling(temperature=0.0, ignores_end=True)
    ask = Ask(id=number, prompt=prompt, max_tokens=wanted, sampling=sampling)
    assert engine.add_request(ask).refusal is None
    return Record(number, "default", float(trace.arrival_s[number]), len(prompt), wanted)


def _note(record: Record, now_s: float, finish: object) -> None:
    record.num_tokens += 1
    if record.num_tokens == 1:
        record.first_token_s = now_s
    if finish is not None:
        record.state, record.finish_s = State.FINISHED, now_s


def priced(source: ModelSource, plan: Plan, limits: Limits) -> StepCost:
    """Steps by the serving cost model, on as many devices of `local` as there are ranks."""
    model = source.model()
    serving = ServingPlan(
        layers=even_split(model.num_layers, plan.pp),
        tensor=plan.tp,
        replicas=1,
        batch=limits.max_running,
        chunk=limits.token_budget,
        weights="fp32",
        cache="fp32",
    )
    cluster = parse_cluster(f"{plan.world_size}xlocal")
    return PricedSteps(Stepper(layout(model, serving), cluster, serving, TRIPTYCH))


def quantiles(records: Sequence[Record]) -> dict[str, float]:
    """Seconds, by what they are."""
    ttft = [record.ttft_s for record in records]
    tpot = [record.tpot_s for record in records if record.num_tokens > 1]
    return {
        f"{name} p{q}": float(np.percentile(values, q))
        for name, values in (("TTFT", ttft), ("TPOT", tpot))
        for q in QUANTILES
    }


def rows(claim: str, found: dict[str, float], foretold: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of one simulation."""
    return [
        {
            "claim": f"{what} {claim}",
            "peer": "the engine",
            "metric": "s",
            "ours": foretold[what],
            "theirs": found[what],
            "ratio": foretold[what] / found[what],
            "better": "near 1",
        }
        for what in found
    ]


def measured(engine: Engine, cost: StepCost, trace: Trace, load: float) -> list[dict[str, Any]]:
    """Both simulations beside the engine."""
    flood = trace.head(48)
    flood = flood.at_rate(1e6)
    run(engine, flood.head(16), 1)
    capacity = len(flood) / run(engine, flood, 2).seconds
    sent = trace.at_rate(load * capacity)
    sent = Trace(**{**_columns(sent), "arrival_s": sent.arrival_s - sent.arrival_s[0]})
    warm = run(engine, sent.head(len(sent) // 4), 3)
    found = run(engine, sent, 4)
    limits = engine.limits
    foretold = simulate(sent, [Replica(limits, cost)])
    learnt = simulate(sent, [Replica(limits, RowCost(warm.times.price, limits.stages))])
    print(f"{capacity:.2f} requests/s at once; sent at {sent.rate_per_s:.2f}/s", flush=True)
    seen = quantiles(found.records)
    made = rows("from rates of the machine", seen, quantiles(foretold))
    return made + rows("from steps seen before", seen, quantiles(learnt))


def _columns(trace: Trace) -> dict[str, Any]:
    return {name: getattr(trace, name) for name in Trace.__dataclass_fields__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plan", default="tp=1")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = ModelSource.open(options.folder)
    degrees = {key: int(value) for key, value in read_words(options.plan).items()}
    fp32 = Precision(parameter="fp32", master="fp32")
    plan = Plan.uniform(source.model().num_layers, precision=fp32, **degrees)
    trace = read_trace(options.trace).head(options.requests).capped(INPUT, OUTPUT)
    with Engine.open(options.folder, plan, SETTINGS) as engine:
        found = measured(engine, priced(source, plan, engine.limits), trace, options.load)
    show(found, options.json)


if __name__ == "__main__":
    main()
