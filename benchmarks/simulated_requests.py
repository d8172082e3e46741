"""Simulated requests a processor second: single-shot groups, and a replica of an LLM.

python benchmarks/simulated_requests.py [--requests 1000000] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from triptych.serve.core.limits import Limits
from triptych.simulate import run, single_shot
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.replica import LinearCost, Replica
from triptych.simulate.single_shot import Group
from triptych.simulate.trace import log_normal_lengths, make

FLOOR_PER_S = 1e5
LINE_S = (0.03, 0.029, 0.029, 0.031)


def per_second(count: int, work: Callable[[], object]) -> float:
    """Requests a processor second."""
    start = time.process_time()
    work()
    return count / (time.process_time() - start)


def main() -> None:
    """Prints each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, count = np.random.default_rng(0), options.requests
    arrival_s = draw([Window(count / 64, 64.0, 4.0)], rng)
    model = rng.integers(0, 32, len(arrival_s))
    objectives = np.full(len(arrival_s), 0.495)
    one = [Group(dict.fromkeys(range(32), LINE_S))]
    two = [Group(dict.fromkeys(held, LINE_S)) for held in (range(20), range(12, 32))]
    trace = make(arrival_s[: count // 500] * 10, log_normal_lengths((500, 1), (200, 1)), rng)
    limits = Limits(num_blocks=20_000, model_context=1 << 20, prefix_reuse=False)
    replica = Replica(limits, LinearCost(fixed_s=0.01, token_s=4e-5, context_s=2e-8))
    found = {
        "single-shot, 2 groups, objectives": per_second(
            len(arrival_s), lambda: single_shot.simulate(arrival_s, model, two, objectives)
        ),
        "single-shot, 1 group, no objectives": per_second(
            len(arrival_s), lambda: single_shot.simulate(arrival_s, model, one)
        ),
        "LLM, 500 tokens in, 200 out": per_second(
            len(trace), lambda: run.simulate(trace, [replica])
        ),
    }
    if options.json:
        rows = [
            {
                "claim": name,
                "peer": "floor of the issue",
                "metric": "simulated requests a CPU second",
                "ours": value,
                "theirs": FLOOR_PER_S,
                "ratio": value / FLOOR_PER_S,
                "better": "higher",
            }
            for name, value in found.items()
            if name.startswith("single-shot")
        ]
        print(json.dumps({"rows": rows}))
        return
    for name, value in found.items():
        print(f"{name:40} {value:12,.0f} requests a CPU second")


if __name__ == "__main__":
    main()
