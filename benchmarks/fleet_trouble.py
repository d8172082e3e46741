"""What becomes of a fleet's users when things go wrong: a group killed, a model added, a shift.

A group is killed under load, a model is added by the file and SIGHUP, and the load shifts to one
model while `--replace-every` watches. Every answer that came is compared with that of a single
engine; attainment is counted in windows of 5 s.

    python benchmarks/fleet_trouble.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from sides.server import server
from sides.small_fleet import EXTRA, GROUPS, IDS, NAMES, NEW, fleet_text, make_models, row
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.sampling import Sampling
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.engine.text import TextStream
from triptych.serve.engine.values import Ask


def reference(folder: Path, names: Sequence[str], asked: dict[str, list[tuple[list[int], int]]]
              ) -> dict[tuple[str, int], str]:  # fmt: skip
    """What a single engine says to each prompt of each model."""
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


async def trouble(url: str, process: psutil.Process, file: Path, load: Load, say: Any
                  ) -> dict[str, float]:  # fmt: skip
    """Kill, add, shift; seconds until attainment is back to nine tenths of what it was."""
    done, marks = asyncio.Event(), {}
    task = asyncio.create_task(load.run(done))
    await asyncio.sleep(10)
    core = sorted(os.sched_getaffinity(0))[0]
    groups = [p for p in process.children() if "group_process" in " ".join(p.cmdline())]
    victim = next(p for p in groups if p.cpu_affinity() == [core])
    marks["killed"] = time.monotonic()
    victim.kill()
    say("killed group 0")
    await asyncio.sleep(25)
    marks["added"] = time.monotonic()
    file.write_text(fleet_text((*NAMES, NEW), (GROUPS[0], (*GROUPS[1], NEW)), load.slo_s))
    process.send_signal(signal.SIGHUP)
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


def measured(folder: Path, say: Any) -> list[dict[str, Any]]:
    """The rows: texts, answers, attainment after each event."""
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
    log = file.with_suffix(".log")
    with server(file, "--replace-every", "10", log=log) as (url, process):
        load = Load(url, asked, slo_s)
        load.rate = 10.0
        marks = asyncio.run(trouble(url, process, file, load, say))
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
    say("  the server said: " + " | ".join(log.read_text().splitlines()[-8:]))
    before = load.attained(first_s, marks["killed"])[0]
    after = load.attained(marks["killed"] + 10, marks["killed"] + 25)[0]
    settled = load.attained(marks["shifted"] + 30, marks["shifted"] + 45)[0]
    shifted = load.attained(marks["shifted"], marks["shifted"] + 10)[0]
    return [
        row("wrong texts", "count", len(wrong), 0),
        row("requests neither answered nor refused clearly", "count", len(unclear), 0),
        row("attainment 10 to 25 s after a group was killed", "attainment", after, before),
        row("attainment 30 to 45 s after a shift beside its first 10 s", "attainment",
             settled, shifted),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name), (*NAMES, NEW))
        rows = measured(Path(name), say)
    if options.json:
        print(json.dumps({"rows": rows}))
    for found in [] if options.json else rows:
        say(f"{found['claim']}: {found['ours']:.4f} beside {found['theirs']:.4f}")


if __name__ == "__main__":
    main()
