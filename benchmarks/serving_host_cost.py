"""What the host does for a step of 256 running requests, and whether the ranks wait for it.

Two figures without a peer: processor milliseconds of one step for scheduling (taking in the tokens,
planning) and for preparing (the broadcast, rows and inputs on a rank); and how long an executor of
constant 6 ms stands idle between two steps while the engine plans one ahead.

    python benchmarks/serving_host_cost.py [--running 256] [--steps 200] [--json]
"""

from __future__ import annotations

import argparse
import json
import pickle
import queue
import statistics
import threading
import time
from typing import Any

import numpy as np

from triptych.serve.core.limits import Limits
from triptych.serve.core.tables import Tables
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.values import Ask
from triptych.serve.engine.worker import Done, Work

STEP_S = 0.006
PROMPT = 100


class ConstantRanks:
    """Ranks that prepare a step as ours do and then compute for a constant time."""

    def __init__(self, limits: Limits, step_s: float) -> None:
        self.idle_s: list[float] = []
        self.prepare_s: list[float] = []
        self._tables, self._step_s = Tables(limits), step_s
        self._last = np.zeros(limits.max_running, np.int64)
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Takes a step, as a broadcast would carry it."""
        self._steps.put(pickle.dumps(work))

    def collect(self, timeout_s: float | None) -> Done | None:
        """What the oldest step brought."""
        return self._done.get()

    def fileno(self) -> int:
        """Nothing to select on."""
        return -1

    def close(self, message: bytes | None = None) -> None:
        """Ends the thread."""
        self._steps.put(None)
        self._thread.join()

    def _live(self) -> None:
        while True:
            began_s = time.perf_counter()
            message = self._steps.get()
            self.idle_s.append(time.perf_counter() - began_s)
            if message is None:
                return
            cpu_s = time.thread_time()
            step = pickle.loads(message).step
            rows = self._tables.apply(step)
            ids = rows.tokens.astype(np.int64)
            decodes = rows.slots[: len(step.decodes)]
            ids[: len(decodes)] = self._last[decodes]
            self.prepare_s.append(time.thread_time() - cpu_s)
            time.sleep(self._step_s)
            tokens = list(range(len(step.samples)))
            self._last[rows.samples] = tokens
            self._done.put(Done(step.id, tokens))


def measure(running: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Processor seconds of the engine's thread, of preparing, and idle seconds, a step each."""
    limits = Limits(
        num_blocks=running * 40, model_context=640, max_running=running, token_budget=running + 256
    )
    ranks = ConstantRanks(limits, STEP_S)
    engine = Engine(ranks, limits)
    for number in range(running):
        prompt = [number * 7 % 1000 + place for place in range(PROMPT)]
        engine.add_request(Ask(id=number, prompt=prompt, max_tokens=500))
    while engine.load.num_running < running or engine.scheduler.book.prefilling:
        engine.step()
    for _ in range(5):
        engine.step()
    first = len(ranks.idle_s)
    schedule_s = []
    for _ in range(steps):
        cpu_s = time.thread_time()
        engine.step()
        schedule_s.append(time.thread_time() - cpu_s)
    found = schedule_s, ranks.prepare_s[first:][:steps], ranks.idle_s[first:][:steps]
    for number in range(running):
        engine.abort(number)
    while engine.is_busy:
        engine.step()
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = ("schedule, CPU", "prepare, CPU", f"idle behind {STEP_S * 1e3:g} ms, wall")
    rows: list[dict[str, Any]] = []
    for name, found in zip(names, measure(options.running, options.steps), strict=True):
        milliseconds = sorted(1e3 * value for value in found)
        rows.append(
            {
                "claim": f"{name}, {options.running} running",
                "metric": "ms a step",
                "ours": statistics.median(milliseconds),
                "mean": statistics.fmean(milliseconds),
                "p90": milliseconds[len(milliseconds) * 9 // 10],
                "better": "lower",
            }
        )
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(f"{row['claim']:44} median {row['ours']:.3f}, mean {row['mean']:.3f}, "
              f"p90 {row['p90']:.3f} {row['metric']}")  # fmt: skip


if __name__ == "__main__":
    main()
