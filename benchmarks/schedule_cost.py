"""What scheduling costs the host: milliseconds a step with 256 running requests.

`schedule` is `plan` and `complete` of `serve/core`; `prepare` is what each rank does with a step
before the device starts: its tables and rows as arrays. Steps are planned one ahead.

    python benchmarks/schedule_cost.py [--running 256] [--steps 400] [--json]

Where `perf` can count instructions, it prints those of a step too: the difference of two runs of
different length, so that starting up does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.step import Step
from triptych.serve.core.tables import Tables

FLOOR_MS, AIM_MS = 1.5, 0.7
PROMPT, ANSWER = 512, 256


class Bench:
    """A full scheduler; `arrivals` new requests come for each that ends."""

    def __init__(self, running: int) -> None:
        self.limits = Limits(
            num_blocks=running * 64, model_context=4096, max_running=running, token_budget=2048
        )
        self.scheduler, self.tables = Scheduler(self.limits), Tables(self.limits)
        self.steps: list[Step] = []
        self.next_id = 0
        self.now_s = 0.0

    def admit(self, max_tokens: int) -> None:
        """A prompt that shares nothing with another one."""
        prompt = range(self.next_id * PROMPT, (self.next_id + 1) * PROMPT)
        request = Request(
            id=self.next_id, prompt=prompt, max_tokens=max_tokens, arrival_s=self.now_s
        )
        self.scheduler.admit(request, self.now_s)
        self.next_id += 1

    def turn(self) -> tuple[float, float, Step]:
        """Processor seconds of one step: schedule, prepare."""
        self.now_s += 0.01
        start = time.thread_time()
        while (step := self.scheduler.plan(self.now_s)) is not None:
            self.steps.append(step)
        step = self.steps.pop(0)
        tokens = [1] * len(step.samples)
        self.scheduler.complete(step.id, tokens, self.now_s)
        middle = time.thread_time()
        self.tables.apply(step)
        return middle - start, time.thread_time() - middle, step


def decode_only(running: int, num_steps: int) -> list[tuple[float, float]]:
    """All requests decode."""
    bench = Bench(running)
    for _ in range(running):
        bench.admit(3000)
    while bench.turn()[2].chunks or len(bench.scheduler.book.decoding) < running:
        pass
    return [bench.turn()[:2] for _ in range(num_steps)]


def mixed(running: int, num_steps: int) -> list[tuple[float, float]]:
    """Requests end and new ones take their place: every step has prompts too."""
    bench, found = Bench(running), []
    for number in range(running):
        bench.admit(1 + number * ANSWER // running)  # so that ends are spread out
    while len(found) < num_steps:
        while bench.scheduler.load.num_waiting < 4:
            bench.admit(ANSWER)
        *seconds, step = bench.turn()
        if bench.next_id > 2 * running and step.chunks:
            found.append((seconds[0], seconds[1]))
    return found


def summary(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median and 99th percentile in milliseconds."""
    totals = sorted(1e3 * (a + b) for a, b in pairs)
    schedule, prepare = (sorted(1e3 * pair[i] for pair in pairs) for i in (0, 1))
    middle = len(totals) // 2
    return {
        "steps": name,
        "schedule_ms": schedule[middle],
        "prepare_ms": prepare[middle],
        "total_ms": totals[middle],
        "total_p99_ms": totals[int(len(totals) * 0.99)],
    }


KINDS = {"decode": decode_only, "mixed": mixed}


def instructions(name: str, running: int, num_steps: int) -> float | None:
    """User-space instructions of one step by `perf`; None where it cannot count."""
    if shutil.which("perf") is None:
        return None
    counts = []
    for steps in (num_steps, 3 * num_steps):
        command = ["perf", "stat", "-x,", "-e", "instructions:u", sys.executable, __file__]
        command += ["--only", name, "--running", str(running), "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        found = re.search(r"^(\d+),.*instructions", done.stderr, re.MULTILINE)
        if done.returncode or found is None:
            return None
        counts.append(int(found.group(1)))
    return (counts[1] - counts[0]) / (2 * num_steps)


def main() -> None:
    """Prints both kinds of steps beside floor and aim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", choices=KINDS, help="one kind of steps, nothing printed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    gc.freeze()
    if options.only:
        KINDS[options.only](options.running, options.steps)
        return
    found = [summary(name, kind(options.running, options.steps)) for name, kind in KINDS.items()]
    if options.json:
        rows = [
            {
                "claim": f"schedule and prepare, {row['steps']}, {options.running} running",
                "peer": "floor of the issue",
                "metric": "CPU ms a step",
                "ours": row["total_ms"],
                "theirs": FLOOR_MS,
                "ratio": row["total_ms"] / FLOOR_MS,
                "better": "lower",
            }
            for row in found
        ]
        print(json.dumps({"rows": rows}))
        return
    print(f"{options.running} running; floor {FLOOR_MS} ms, aim {AIM_MS} ms a step")
    for row in found:
        print("  ".join(f"{k} {v:.3f}" if k != "steps" else f"{v:7}" for k, v in row.items()))
    for name in KINDS:
        count = instructions(name, options.running, 100)
        print(
            f"{name:7}  "
            + ("instructions: perf cannot count" if count is None else f"{count:,.0f} instructions")
        )


if __name__ == "__main__":
    main()
