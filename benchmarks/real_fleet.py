"""A real fleet beside its simulation, and what becomes of its users when things go wrong.

python benchmarks/real_fleet.py [--part 1|2] [--requests 3000] [--load 0.7 | --rate R] [--json]

Part 1: four small random LLMs on two groups of one core each behind `triptych serve fleet.toml`.
The prices of steps are those that the server itself has learnt while it warmed up (/metrics), just
before; what a request costs outside the groups is measured on single ones. Requests (Gamma, CV 4)
come at the rate that would load the groups by `--load` if each were alone; objectives are scaled so
that the simulator meets 85 % of them. Each request is held against the simulator's: is it in time
in both?

Part 2: a group is killed under load, a model is added by the file and SIGHUP, and the load shifts
to one model while `--replace-every` watches. Every answer that came is compared with that of a
single engine; attainment is counted in windows of 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1] / "tests" / "procs" / "serve"
sys.path.insert(0, str(_TESTS))

import httpx2  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
from serve_samples import config_of, save_model  # noqa: E402

from triptych.fleet.shared import RowCost, Seat, SharedFleet, SharedGroup  # noqa: E402
from triptych.fleet.terms import StepPrice, Terms  # noqa: E402
from triptych.serve.core.limits import Limits  # noqa: E402
from triptych.serve.core.request import State  # noqa: E402
from triptych.serve.load.replay import Outcome, Target, replay  # noqa: E402
from triptych.simulate.arrivals import Window, draw_models, power_law_shares  # noqa: E402
from triptych.simulate.replica import Record  # noqa: E402
from triptych.simulate.trace import Trace, make, uniform_lengths  # noqa: E402

NAMES = ("ant", "bee", "cat", "dog")
NEW = "elk"
GROUPS = (("ant", "bee", "cat"), ("bee", "cat", "dog"))
SIZES = {"context": 256, "max_running": 32, "token_budget": 128}
PROMPTS, ANSWERS = (8, 96), (6, 30)
CV, SHARES, WANTED = 4.0, 0.5, 0.85
NO_OBJECTIVE_S = 60.0
EXTRA = {"temperature": 0, "ignore_eos": True, "stream": False}
IDS = (10, 250)


def make_models(folder: Path, names: Sequence[str]) -> None:
    """Random Llamas of 6 layers, a different one for each name."""
    config = config_of(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    for seed, name in enumerate(names):
        (folder / name).mkdir()
        save_model(folder / name, config, seed)


def fleet_text(models: Sequence[str], groups: Sequence[Sequence[str]], slo_s: float) -> str:
    """A fleet file."""
    lines = [f"[devices]\ncount = {len(groups)}"]
    for name in models:
        sizes = "\n".join(f"{key} = {value}" for key, value in SIZES.items())
        lines.append(f'[[models]]\nname = "{name}"\nfolder = "{name}"\nslo_s = {slo_s}\n{sizes}')
    cores = sorted(os.sched_getaffinity(0))
    for index, held in enumerate(groups):
        listed = ", ".join(f'"{name}"' for name in held)
        core = cores[index % len(cores)]
        lines.append(f"[[groups]]\nmodels = [{listed}]\ncores = [{core}]")
    return "\n\n".join(lines) + "\n"


@contextmanager
def serving(file: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """The server of a fleet file."""
    command = [sys.executable, "-m", "triptych", "serve", str(file), "--port", "0", *options]
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        while (ready := re.search(r"at (http\S+),", file.with_suffix(".log").read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(file.with_suffix(".log").read_text())
            time.sleep(0.1)
        yield ready[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


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


def part_one(
    folder: Path, count: int, load: float, rate: float | None, say: Any
) -> list[dict[str, Any]]:
    file, began_s = folder / "fleet.toml", time.monotonic()
    file.write_text(fleet_text(NAMES, GROUPS, NO_OBJECTIVE_S))
    with serving(file) as (url, server):
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
        server.send_signal(signal.SIGHUP)
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
        _row("attainment, 4 LLMs on 2 groups", "attainment", real.mean(), sim.mean()),
        _row("requests on which both agree", "share", (real == sim).mean(), 1.0),
    ]


# ---- part 2 ---------------------------------------------------------------------------------


def reference(folder: Path, names: Sequence[str], asked: dict[str, list[tuple[list[int], int]]]
              ) -> dict[tuple[str, int], str]:  # fmt: skip
    """What a single engine says to each prompt of each model."""
    from triptych.serve.engine.engine import Engine
    from triptych.serve.engine.sampling import Sampling
    from triptych.serve.engine.settings import EngineSettings
    from triptych.serve.engine.source import ModelSource
    from triptych.serve.engine.text import TextStream
    from triptych.serve.engine.values import Ask

    found = {}
    for name in names:
        tokenizer = ModelSource.open(folder / name).tokenizer()
        with Engine.open(folder / name, None, EngineSettings(context=256)) as engine:
            for number, (prompt, size) in enumerate(asked[name]):
                ask = Ask(id=number, prompt=prompt, max_tokens=size,
                          sampling=Sampling(ignores_end=True))  # fmt: skip
                stream = TextStream(tokenizer, prompt)
                tokens = [output.token for output in engine.stream([ask])]
                text = "".join(stream.add(token) for token in tokens if token is not None)
                found[name, number] = text + stream.finish()
    return found


class Load:
    """Requests from a pool of prompts, sent in the background; what came of each."""

    def __init__(self, url: str, asked: dict[str, list[tuple[list[int], int]]], slo_s: float):
        self.url, self.asked, self.slo_s = url, asked, slo_s
        self.rate, self.shares = 0.0, dict.fromkeys(NAMES, 0.25)
        self.found: list[tuple[float, str, int, int, float, str]] = []
        self._draws = np.random.default_rng(11)

    async def run(self, until: asyncio.Event) -> None:
        """Sends until it is told to stop, and waits for what was sent."""
        limits = httpx2.Limits(max_connections=None)
        client = httpx2.AsyncClient(timeout=60, limits=limits)
        async with client, asyncio.TaskGroup() as tasks:
            while not until.is_set():
                await asyncio.sleep(self._draws.exponential(1 / self.rate))
                names = list(self.shares)
                name = names[self._draws.choice(len(names), p=list(self.shares.values()))]
                number = int(self._draws.integers(len(self.asked[name])))
                tasks.create_task(self._one(client, name, number))

    async def _one(self, client: httpx2.AsyncClient, name: str, number: int) -> None:
        prompt, size = self.asked[name][number]
        body = {"model": name, "prompt": prompt, "max_tokens": size, **EXTRA}
        at_s = time.monotonic()
        try:
            response = await client.post(self.url + "/completions", json=body)
            status = response.status_code
            said = response.json()
            text = said["choices"][0]["text"] if status == 200 else said["error"]["message"]
        except (httpx2.HTTPError, ValueError, LookupError) as error:
            status, text = 0, repr(error)
        self.found.append((at_s, name, number, status, time.monotonic() - at_s, text))

    def attained(self, low_s: float, high_s: float) -> tuple[float, int]:
        """Of the requests sent in a stretch of time, the share in time, and their number."""
        mine = [f for f in self.found if low_s <= f[0] < high_s]
        good = sum(status == 200 and took_s <= self.slo_s for _, _, _, status, took_s, _ in mine)
        return good / max(1, len(mine)), len(mine)


async def trouble(url: str, server: psutil.Process, file: Path, load: Load, say: Any
                  ) -> dict[str, float]:  # fmt: skip
    """Kill, add, shift; seconds until attainment is back to nine tenths of what it was."""
    done, marks = asyncio.Event(), {}
    task = asyncio.create_task(load.run(done))
    await asyncio.sleep(10)
    core = sorted(os.sched_getaffinity(0))[0]
    groups = [p for p in server.children() if "group_process" in " ".join(p.cmdline())]
    victim = next(p for p in groups if p.cpu_affinity() == [core])
    marks["killed"] = time.monotonic()
    victim.kill()
    say("killed group 0")
    await asyncio.sleep(25)
    marks["added"] = time.monotonic()
    file.write_text(fleet_text((*NAMES, NEW), (GROUPS[0], (*GROUPS[1], NEW)), load.slo_s))
    server.send_signal(signal.SIGHUP)
    async with httpx2.AsyncClient(timeout=60) as client:
        while NEW not in (await client.get(url + "/models")).text:
            await asyncio.sleep(0.1)
    say(f"{NEW} is there after {time.monotonic() - marks['added']:.1f} s")
    load.shares = dict.fromkeys((*NAMES, NEW), 0.2)
    await asyncio.sleep(15)
    marks["shifted"] = time.monotonic()
    load.shares = {"ant": 0.92, "bee": 0.02, "cat": 0.02, "dog": 0.02, NEW: 0.02}
    load.rate *= 1.6
    say("all want ant, which is on group 0 only")
    await asyncio.sleep(45)
    done.set()
    await task
    return marks


def part_two(folder: Path, say: Any) -> list[dict[str, Any]]:
    file, rng = folder / "fleet.toml", np.random.default_rng(3)
    asked = {
        name: [
            (rng.integers(*IDS, rng.integers(8, 60)).tolist(), int(rng.integers(6, 30)))
            for _ in range(30)
        ]
        for name in (*NAMES, NEW)
    }
    texts = reference(folder, (*NAMES, NEW), asked)
    slo_s = 1.0
    file.write_text(fleet_text(NAMES, GROUPS, slo_s))
    with serving(file, "--replace-every", "10") as (url, server):
        load = Load(url, asked, slo_s)
        load.rate = 10.0
        marks = asyncio.run(trouble(url, server, file, load, say))
        log = file.with_suffix(".log").read_text()
    wrong = [f for f in load.found if f[3] == 200 and f[5] != texts[f[1], f[2]]]
    statuses = {s: sum(f[3] == s for f in load.found) for s in {f[3] for f in load.found}}
    unclear = [f for f in load.found if f[3] not in (200, 429, 503)]
    say(f"{len(load.found)} requests: {statuses}; {len(wrong)} wrong texts")
    for found in [f for f in load.found if f[3] not in (200, 429)][:5]:
        say(f"  {found[3]} {found[5][:150]}")
    first_s = load.found[0][0]
    for low_s in np.arange(0.0, load.found[-1][0] - first_s, 5.0):
        share, count = load.attained(first_s + low_s, first_s + low_s + 5)
        events = [n for n, at in marks.items() if low_s <= at - first_s < low_s + 5]
        say(f"  {low_s:5.0f} s: {share:.3f} of {count:3} {' '.join(events)}")
    say("  the server said: " + " | ".join(log.splitlines()[-8:]))
    before = load.attained(first_s, marks["killed"])[0]
    after = load.attained(marks["killed"] + 10, marks["killed"] + 25)[0]
    settled = load.attained(marks["shifted"] + 30, marks["shifted"] + 45)[0]
    shifted = load.attained(marks["shifted"], marks["shifted"] + 10)[0]
    return [
        _row("wrong texts", "count", len(wrong), 0),
        _row("requests neither answered nor refused clearly", "count", len(unclear), 0),
        _row("attainment 10 to 25 s after a group was killed", "attainment", after, before),
        _row("attainment 30 to 45 s after a shift beside its first 10 s", "attainment",
             settled, shifted),
    ]  # fmt: skip


def _row(claim: str, metric: str, ours: float, theirs: float) -> dict[str, Any]:
    row = {"claim": claim, "peer": "simulator or before", "metric": metric}
    ratio = float(ours) / theirs if theirs else float(ours == theirs)
    return {**row, "ours": float(ours), "theirs": float(theirs), "ratio": ratio, "better": "higher"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--load", type=float, default=0.7, help="of the groups")
    parser.add_argument("--rate", type=float, help="requests a second, in place of --load")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, (*NAMES, NEW))
        if options.part != 2:
            rows += part_one(folder, options.requests, options.load, options.rate, say)
        if options.part != 1:
            rows += part_two(folder, say)
    if options.json:
        print(json.dumps({"rows": rows}))
    for row in [] if options.json else rows:
        say(f"{row['claim']}: {row['ours']:.4f} beside {row['theirs']:.4f}")


if __name__ == "__main__":
    main()
