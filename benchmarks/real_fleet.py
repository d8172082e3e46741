"""A real fleet beside its simulation.

Four small random LLMs on two groups of one core each behind `triptych serve fleet.toml`. The prices
of steps are those that the server itself has learnt while it warmed up (/metrics), just before;
what a request costs outside the groups is measured on single ones. Requests (Gamma, CV 4) come at
the rate that would load the groups by `--load` if each were alone; objectives are scaled so that
the simulator meets 85 % of them. Each request is held against the simulator's: is it in time in
both?

    python benchmarks/real_fleet.py [--requests 3000] [--load 0.7 | --rate R] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from sides.server import server
from sides.small_fleet import EXTRA, GROUPS, IDS, NAMES, SIZES, fleet_text, make_models, row
from triptych.fleet.shared import RowCost, Seat, SharedFleet, SharedGroup
from triptych.fleet.terms import Terms
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice
from triptych.serve.core.request import State
from triptych.serve.engine.settings import CPU_AHEAD_BELOW_S
from triptych.serve.load.replay import Outcome, Target, replay
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
from triptych.simulate.replica import Record
from triptych.simulate.trace import Trace, make, uniform_lengths

PROMPTS, ANSWERS = (8, 96), (6, 30)
CV, SHARES, WANTED = 4.0, 0.5, 0.85
NO_OBJECTIVE_S = 60.0


def drawn(rate: float, count: int, seed: int, shares: Sequence[float] | None = None) -> Trace:
    """The first requests of Gamma processes of four models."""
    rng = np.random.default_rng(seed)
    parts = power_law_shares(len(NAMES), SHARES) if shares is None else np.array(shares)
    window = Window(3 * count / rate, rate, CV)
    arrival_s, model = draw_models([window], parts, rng)
    return make(arrival_s, uniform_lengths(PROMPTS, ANSWERS), rng, model, NAMES).head(count)


def prompts_of(trace: Trace, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(*IDS, size).tolist() for size in trace.prompt_tokens.tolist()]


def send(url: str, trace: Trace, seed: int) -> Outcome:
    return asyncio.run(replay(Target(url=url), trace, prompts_of(trace, seed), EXTRA))


def prices(url: str) -> dict[tuple[str, int], StepPrice]:
    """What steps have cost, by model and group, as the server's router has learnt."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    text = httpx2.get(url.removesuffix("/v1") + "/metrics").text
    pattern = r'triptych_step_(\w+)_seconds{group="(\d+)",model="(\w+)"} (\S+)'
    for part, group, model, value in re.findall(pattern, text):
        found.setdefault((model, int(group)), {})[part] = float(value)
    return {k: StepPrice(v["fixed"], v["decode_row"], v["prompt_row"]) for k, v in found.items()}


def simulated(
    warming: Trace,
    trace: Trace,
    learnt: dict[tuple[str, int], StepPrice],
    slo_s: float,
    overhead_s: float,
) -> list[Record]:
    """What becomes of the requests, after others that the router learns from."""
    limits = Limits(
        num_blocks=10_000,
        model_context=SIZES["context"],
        max_running=SIZES["max_running"],
        max_waiting=4096,
        token_budget=SIZES["token_budget"],
        prefix_reuse=False,
        ahead_below_s=CPU_AHEAD_BELOW_S,
    )
    groups = [
        SharedGroup(
            seats=tuple(
                Seat(
                    model=NAMES.index(name),
                    cost=RowCost(learnt[name, index]),
                    limits=limits,
                    price=learnt[name, index],
                )
                for name in held
            )
        )
        for index, held in enumerate(GROUPS)
    ]
    terms = dict.fromkeys(range(len(NAMES)), Terms(answer_s=NO_OBJECTIVE_S))
    fleet = SharedFleet(groups, terms, overhead_s=overhead_s)
    before = fleet.run(warming)
    for place in fleet.router.places:
        place.terms = Terms(answer_s=slo_s)
    start_s = max(record.finish_s for record in before) + 1.0
    return fleet.run(replace(trace, arrival_s=trace.arrival_s + start_s))


def in_time(records: Sequence[Record], slo_s: float) -> np.ndarray[Any, Any]:
    return np.array(
        [r.state is State.FINISHED and r.finish_s - r.arrival_s <= slo_s for r in records]
    )


def measured_overhead_s(url: str, learnt: dict[tuple[str, int], StepPrice]) -> float:
    """Of single requests: what is not steps."""
    trace = drawn(1.0, 24, 99)
    trace = replace(trace, arrival_s=np.arange(len(trace)) * 0.3)
    outcome = send(url, trace, 99)
    alone = {m: next(p for (name, _), p in learnt.items() if name == m) for m in NAMES}
    found = [
        r.finish_s - r.arrival_s - alone[NAMES[m]].of(r.output_tokens, r.output_tokens - 1,
                                                      r.prompt_tokens)
        for r, m in zip(outcome.records, trace.model.tolist(), strict=True)
    ]  # fmt: skip
    return max(0.0, float(np.median(found)))


def scaled(simulate: Any) -> float:
    """The objective that the simulator meets for the wanted share of the requests."""
    low, high = 0.05, 10.0
    for _ in range(8):
        middle = (low * high) ** 0.5
        if in_time(simulate(middle), middle).mean() < WANTED:
            low = middle
        else:
            high = middle
    return float(round(high, 3))


def rate_for(load: float, learnt: dict[tuple[str, int], StepPrice]) -> float:
    """Requests a second that load the groups so much, each alone."""
    sample = drawn(1.0, 500, 1)
    alone_s = [
        next(p for (name, _), p in learnt.items() if name == NAMES[model]).of(out, out - 1, tokens)
        for model, tokens, out in zip(
            sample.model, sample.prompt_tokens, sample.output_tokens, strict=True
        )
    ]
    return float(load * len(GROUPS) / np.mean(alone_s))


def measured(
    folder: Path, count: int, load: float, rate: float | None, say: Any
) -> list[dict[str, Any]]:
    """The rows: attainment, and the requests on which both agree."""
    file, began_s = folder / "fleet.toml", time.monotonic()
    file.write_text(fleet_text(NAMES, GROUPS, NO_OBJECTIVE_S))
    with server(file) as (url, process):
        say(f"started after {time.monotonic() - began_s:.0f} s")
        send(url, drawn(10.0, 150, 4), 4)
        rate = rate or rate_for(load, prices(url))
        warming, trace = drawn(rate, max(150, count // 10), 5), drawn(rate, count, 7)
        say(f"{rate:.1f} requests a second for {trace.arrival_s[-1]:.0f} s")
        send(url, warming, 5)
        learnt = prices(url)
        overhead_s = measured_overhead_s(url, learnt)
        for (name, group), price in sorted(learnt.items()):
            say(f"  {name} on {group}: " + " + ".join(f"{1e3 * part:.3f} ms" for part in price))
        simulate = partial(simulated, warming, trace, learnt, overhead_s=overhead_s)
        slo_s = scaled(lambda slo_s: simulate(slo_s=slo_s))
        say(f"outside of groups {1e3 * overhead_s:.1f} ms a request; objective {slo_s} s")
        file.write_text(fleet_text(NAMES, GROUPS, slo_s))
        process.send_signal(signal.SIGHUP)
        time.sleep(2.0)
        outcome = send(url, trace, 7)
        after = prices(url)
    records = simulate(slo_s=slo_s)
    real, sim = in_time(outcome.records, slo_s), in_time(records, slo_s)
    refused = [np.mean([r.state is State.REFUSED for r in each])
               for each in (outcome.records, records)]  # fmt: skip
    say(f"in time: measured {real.mean():.4f}, simulated {sim.mean():.4f}; "
        f"refused {refused[0]:.4f}, {refused[1]:.4f}; both agree on {(real == sim).mean():.4f}; "
        f"latest sent {1e3 * outcome.lag_s:.0f} ms late; faults that are no refusals: "
        f"{sum(not f.startswith('429') for f in outcome.faults)}")  # fmt: skip
    for name in NAMES:
        mine = trace.model == NAMES.index(name)
        say(f"  {name}: {mine.sum()} requests, {real[mine].mean():.3f}, {sim[mine].mean():.3f}")
    drift = [sum(after[k]) / max(1e-9, sum(learnt[k])) for k in learnt]
    say(f"prices at the end / at the beginning: {min(drift):.2f} to {max(drift):.2f}")
    return [
        row("attainment, 4 LLMs on 2 groups", "attainment", real.mean(), sim.mean()),
        row("requests on which both agree", "share", (real == sim).mean(), 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--load", type=float, default=0.7, help="of the groups")
    parser.add_argument("--rate", type=float, help="requests a second, in place of --load")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name), NAMES)
        rows = measured(Path(name), options.requests, options.load, options.rate, say)
    if options.json:
        print(json.dumps({"rows": rows}))
    for found in [] if options.json else rows:
        say(f"{found['claim']}: {found['ours']:.4f} beside {found['theirs']:.4f}")


if __name__ == "__main__":
    main()
