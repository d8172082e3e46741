"""What it costs to price one plan: by pipeline ranks, micro-batches and schedule.

Three prices, each of a 70B model, in processor milliseconds a plan:

* `search`: a whole search over the plans of a cluster, over all legal plans that it accounts for
  (by a bound of a set, a closed form, or a simulation);
* `exact`: step time and peak of one plan, its very program simulated (`estimate_of`), by a pricer
  that knows the pieces; `whole` is the same with everything that a prediction says beside;
* `theirs`: the same program simulated action by action (`schedule.simulate`), the plain way.

    python benchmarks/pricing_speed.py [--plans WORD] [--json]

`--plans` takes only plans with a word in them, and no searches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from triptych.cluster.text import parse_cluster
from triptych.cost.frame import Frame
from triptych.cost.predict import estimate_of, predict_with
from triptych.cost.pricer import Pricer
from triptych.cost.step import Priced
from triptych.cost.storage import Storage
from triptych.model.load import load_model
from triptych.plan.plan import Plan
from triptych.plan.rules import require_legal
from triptych.plan.toml import load_plan
from triptych.plan.workload import Workload
from triptych.schedule.action import Action, Kind
from triptych.schedule.simulate import simulate
from triptych.search.search import search

FLOOR_MS, AIM_MS = 0.2, 0.02
MODEL = "llama-3.1-70b"
PLANS = (
    ("tp=8,dp=8,zero=1", 1024),
    ("tp=8,pp=4,dp=2,zero=1", 32),
    ("tp=8,pp=4,dp=2,zero=1", 512),
    ("tp=8,pp=4,dp=2,zero=3", 512),
    ("tp=8,pp=4,dp=2,chunks=2,schedule=interleaved", 512),
    ("tp=8,pp=4,dp=2,schedule=gpipe", 512),
    ("tp=8,pp=4,dp=2,chunks=2,schedule=breadth-first", 512),
    ("tp=8,pp=4,dp=2,schedule=zb-h1", 512),
    ("tp=8,pp=4,dp=2,schedule=zb-h2", 512),
    ("tp=8,pp=4,dp=2,chunks=2,schedule=zb-v", 512),
    ("tp=8,pp=4,dp=2,chunks=2,schedule=dualpipe-v", 512),
    ("tp=8,pp=8,zero=0", 256),
    ("tp=4,pp=16,zero=0", 256),
    ("tp=4,pp=16,chunks=5,schedule=interleaved", 256),
    ("tp=1,pp=64,zero=0", 512),
)
SEARCHES = (("8x8xH100-SXM", 512), ("128x8xH100-SXM", 2048))


def cost_ms(run: Callable[[], object], budget_s: float = 0.1) -> float:
    """Processor milliseconds of a call: the least of the means of five rounds."""
    run()
    start = time.process_time()
    run()
    number = max(1, int(budget_s / 5 / max(1e-6, time.process_time() - start)))
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(number):
            run()
        rounds.append((time.process_time() - start) / number)
    return 1e3 * min(rounds)


def plain(pricer: Pricer, plan: Plan) -> None:
    """The plan's program, one action after the other."""
    frame = Frame.of(pricer, plan)
    priced = Priced.of(frame, Storage.of(plan))

    def duration(action: Action) -> float:
        forward_s, backward_s = priced.pairs[action.stage]
        input_s, weight_s = priced.halves[action.stage]
        kinds = {Kind.F: forward_s, Kind.B: backward_s, Kind.I: input_s, Kind.W: weight_s}
        return kinds[action.kind]

    program = frame.program(plan.schedule, frame.num_microbatches)
    simulate(program, duration, lambda _: frame.hop_s)


def exact_row(text: str, batch: int) -> dict[str, Any]:
    """One plan, priced exactly; the pricer forgets its clocks between calls, not its pieces."""
    model, cluster = load_model(MODEL), parse_cluster("8x8xH100-SXM")
    workload = Workload(sequence_length=4096, global_batch=batch)
    plan = load_plan(text, model, cluster)
    require_legal(plan, model, cluster, workload)
    pricer = Pricer(model, cluster, workload)

    def exact() -> None:
        pricer.ends_s.clear()
        estimate_of(pricer, plan)

    def whole() -> None:
        pricer.ends_s.clear()
        predict_with(pricer, plan, with_timeline=False)

    ours_ms, theirs_ms = cost_ms(exact), cost_ms(lambda: plain(pricer, plan))
    count = plan.num_microbatches(batch)
    return {
        "claim": f"{plan.schedule}, pp={plan.pp}, {count} micro-batches",
        "peer": "the program simulated action by action",
        "metric": "processor ms a plan",
        "ours": ours_ms,
        "theirs": theirs_ms,
        "ratio": theirs_ms / ours_ms,
        "better": "lower",
        "whole_ms": cost_ms(whole),
    }


def search_row(cluster: str, batch: int) -> dict[str, Any]:
    """A search, over the plans that it accounts for, against the floor."""
    model, where = load_model(MODEL), parse_cluster(cluster)
    workload = Workload(sequence_length=4096, global_batch=batch)
    start = time.process_time()
    found = search(model, where, workload)
    ours_ms = 1e3 * (time.process_time() - start) / found.legal
    return {
        "claim": f"search on {cluster}: {found.legal} plans, {found.simulated} simulated",
        "peer": "floor",
        "metric": "processor ms a plan",
        "ours": ours_ms,
        "theirs": FLOOR_MS,
        "ratio": FLOOR_MS / ours_ms,
        "better": "lower",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [search_row(*one) for one in SEARCHES if options.plans is None]
    rows += [exact_row(*one) for one in PLANS if (options.plans or "") in one[0]]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"processor ms a plan; floor {FLOOR_MS}, aim {AIM_MS}")
    for row in rows:
        whole = f", with all that it says {row['whole_ms']:.3f}" if "whole_ms" in row else ""
        print(f"  {row['ours']:8.4f}  against {row['theirs']:8.3f}  {row['claim']}{whole}")


if __name__ == "__main__":
    main()
