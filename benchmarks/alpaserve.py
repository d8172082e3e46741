"""Placements beside AlpaServe's: its published request list, another seed, and its result files.

python benchmarks/alpaserve.py MEASUREMENTS [--orderings] [--every N] [--first K] [--json]

MEASUREMENTS is a folder with `alpaserve_workload_8dev.csv` and `alpaserve_results.csv`. Its figures
on the list are AlpaServe's own code's; stage times, memory and the rules of serving are those of
`alpaserve_bert1.3b_stage_latency.csv` and of triptych.simulate.single_shot. They count without the
first and the last 10 s; figures are given so, and of all requests. `--orderings` makes the Gamma
workloads of the result files anew, as the list was drawn, and asks which of two policies serves
more; other models than BERT-1.3B take the latencies of the paper's Table 1, split as that one's
were measured.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.fleet.baselines import replans, replication, round_robin
from triptych.fleet.find import Effort, find, fixed
from triptych.fleet.greedy import fill
from triptych.fleet.judge import Judge
from triptych.fleet.models import Fleet, Served, Shape, evenly
from triptych.fleet.placement import Placement, empty
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
from triptych.simulate.single_shot import simulate
from triptych.simulate.trace import Trace, read_trace

GIB = 2**30
STAGE_OVERHEAD, OVERHEAD_S = 0.009, 0.011
# Of the request list (measurements/README.md): stages at batch 1 without a tensor split.
ROUNDED_S = {
    1: (0.099,),
    2: (0.051, 0.052),
    4: (0.028, 0.027, 0.027, 0.029),
    8: (0.015, *(0.014,) * 6, 0.016),
}
# AlpaServe (2302.11665), Table 1: seconds on one V100, bytes of weights.
TABLE_1 = {
    "bert-6.7b": (0.395, 13.4e9),
    "moe-5.3b": (0.234, 10.6e9),
    "bert-2.6b": (0.238, 5.4e9),
    "moe-2.4b": (0.171, 4.8e9),
    "bert-1.3b": (0.151, 2.4e9),
    "moe-1.3b": (0.150, 2.6e9),
}
KINDS = {
    "mixed": tuple(TABLE_1),
    "bert": tuple(name for name in TABLE_1 if name.startswith("bert")),
}
SEARCH = Effort(trials=2000)
QUICK = Effort(sample=4000, finalists=2, trials=0, slack=1)
UNCOUNTED_S = 10.0  # at each end of a list of requests


def the_list(folder: Path) -> Iterator[tuple[str, float, float, float]]:
    """(case, AlpaServe's attainment or the floor, ours as they count, ours of all requests)."""
    trace = read_trace(folder / "alpaserve_workload_8dev.csv")
    fleet = like_bert(trace, ROUNDED_S)

    def shares(found: Placement) -> tuple[float, float]:
        served = in_time(fleet, trace, found)
        return counted(served, trace), float(served.mean())

    yield "search", 0.8348, *shares(find(fleet, [trace], SEARCH).placement)
    for stages, theirs in ((2, 0.7473), (4, 0.8348), (8, 0.8095)):
        found = fixed(fleet, [trace], Shape(stages), SEARCH if stages < 8 else Effort(trials=0))
        yield f"groups of {stages}", theirs, *shares(found.placement)
    yield "replication", 0.6443, *shares(replication(fleet, [trace]))
    anew = replans(fleet, trace, 60, clairvoyant=True)
    served = np.concatenate([in_time(fleet, window, placement) for window, placement in anew])
    yield "replication anew every 60 s", 0.6772, counted(served, trace), float(served.mean())
    others = [another_seed(trace, seed) for seed in (1, 2, 3)]
    blind = find(fleet, others, replace(SEARCH, trials=800)).placement
    yield "planned on other seeds (floor)", 0.82, *shares(blind)


def in_time(fleet: Fleet, trace: Trace, placement: Placement) -> NDArray[np.bool_]:
    """Of each request, whether it is served."""
    lines = placement.lines(fleet)
    found = simulate(trace.arrival_s, trace.model, lines, trace.slo_s, fleet.overhead_s)
    return found.group >= 0


def counted(served: NDArray[np.bool_], trace: Trace) -> float:
    """The share in time as AlpaServe counts it: without as many requests at each end as 10 s have.

    Its 0.8095 of one group of 8, where there is nothing to choose, is met to the last digit.
    """
    skip = int(UNCOUNTED_S / np.ptp(trace.arrival_s) * len(trace))
    return float(served[skip : len(served) - skip].mean())


def like_bert(trace: Trace, stage_s: dict[int, tuple[float, ...]]) -> Fleet:
    """Eight devices for copies of one model of 2.6 GiB."""
    profiles = {
        Shape(n): evenly(times, 2.6 * GIB, Shape(n), STAGE_OVERHEAD) for n, times in stage_s.items()
    }
    models = tuple(Served(name, profiles) for name in trace.models)
    return Fleet(models, 8, 13 * GIB, OVERHEAD_S)


def stage_times(folder: Path) -> dict[int, tuple[float, ...]]:
    """Measured stages of BERT-1.3B at batch 1, by pipeline depth."""
    return {shape.pipeline: s for shape, s in all_times(folder).items() if shape.tensor == 1}


def all_times(folder: Path) -> dict[Shape, tuple[float, ...]]:
    """The same by shape."""
    with (folder / "alpaserve_bert1.3b_stage_latency.csv").open(newline="") as file:
        return {
            Shape(int(row["pp"]), int(row["op"])): tuple(map(float, row["stage_latency_s"].split()))
            for row in csv.DictReader(file)
            if row["batch_size"] == "1" and row["dp"] == "1"
        }


def another_seed(trace: Trace, seed: int) -> Trace:
    """The same process as the list's: rate 64/s, CV 4, shares by power law 0.5, 200 s."""
    shares = power_law_shares(len(trace.models), 0.5)
    rng = np.random.default_rng(seed)
    arrival_s, model = draw_models([Window(200, 64, 4)], shares, rng)
    ones = np.ones(len(model), np.int64)
    return replace(
        trace,
        arrival_s=arrival_s,
        model=model,
        prompt_tokens=ones,
        output_tokens=ones,
        slo_s=np.full(len(model), trace.slo_s[0]),
    )


def orderings(folder: Path, every: int, first: int) -> Iterator[tuple[str, int, int]]:
    """(setting, pairs of policies, pairs in the published order) of the Gamma cases."""
    times = all_times(folder)
    with (folder / "alpaserve_results.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["arrival"] == "gamma" and row["model_set"] in KINDS and row["mode"] == "simulate"
        ]
    settings: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        names = ("model_set", "n_models", "n_devices", "total_rate", "arrival_kwargs", "slo_scale")
        key = (row["source_file"], *(row[name] for name in names))
        settings[key][row["policy"]] = float(row["goodput_slo_attainment"])
    for key in sorted(settings)[first::every]:
        published = settings[key]
        pairs = [
            (one, other)
            for one, other in combinations(sorted(published), 2)
            if abs(published[one] - published[other]) > 0.01
        ]
        if not pairs:
            continue
        fleet, trace = workload(key[1:], times)
        ours = {name: attained(name, fleet, trace) for name in {n for pair in pairs for n in pair}}
        right = sum((ours[a] > ours[b]) == (published[a] > published[b]) for a, b in pairs)
        shown = {name: (published[name], round(value, 3)) for name, value in sorted(ours.items())}
        yield f"{' '.join(key[1:])} {shown}", len(pairs), right


def workload(
    setting: tuple[str, ...], times: dict[Shape, tuple[float, ...]]
) -> tuple[Fleet, Trace]:
    """Models in turns of all kinds, shares by power law 0.5, 200 s, weights of 13 GiB a device."""
    kinds, num_models, num_devices, rate, arrival, scale = setting
    names = [KINDS[kinds][i % len(KINDS[kinds])] for i in range(int(num_models))]
    by_kind = {name: served(name, times) for name in set(names)}
    models = tuple(replace(by_kind[name], name=f"m{i}") for i, name in enumerate(names))
    rates = float(rate) * power_law_shares(len(models), 0.5)
    cv = float(ast.literal_eval(arrival)["cv"])
    times_s = [drawn(float(each), cv, seed) for seed, each in enumerate(rates)]
    number = np.repeat(np.arange(len(models)), [len(t) for t in times_s])
    order = np.argsort(np.concatenate(times_s), kind="stable")
    arrival_s, model = np.concatenate(times_s)[order], number[order]
    ones = np.ones(len(model), np.int64)
    alone_s = np.array([TABLE_1[name][0] for name in names])
    trace = Trace(
        arrival_s=arrival_s,
        prompt_tokens=ones,
        output_tokens=ones,
        model=model,
        models=tuple(m.name for m in models),
        slo_s=float(scale) * alone_s[model],
    )
    return Fleet(models, int(num_devices), 13 * GIB, OVERHEAD_S), trace


def drawn(rate_per_s: float, cv: float, seed: int) -> NDArray[np.float64]:
    """200 s of arrivals as AlpaServe draws them: the published list is met to the microsecond."""
    rng = np.random.RandomState(seed)
    count = max(1, int(rate_per_s * 200 * 1.2))
    times_s = rng.gamma(1 / cv**2, cv**2 / rate_per_s, count).cumsum()
    while times_s[-1] < 200:
        more = rng.gamma(1 / cv**2, cv**2 / rate_per_s, count)
        times_s = np.append(times_s, times_s[-1] + more.cumsum())
    return times_s[times_s < 200]


def served(kind: str, times: dict[Shape, tuple[float, ...]]) -> Served:
    """A model whose stages are those of BERT-1.3B, longer or shorter as a whole."""
    seconds, weights = TABLE_1[kind]
    whole = sum(times[Shape(1)])
    profiles = {
        shape: evenly([s * seconds / whole for s in stages], weights, shape, STAGE_OVERHEAD)
        for shape, stages in times.items()
        if shape.tensor <= 4
    }
    return Served(kind, profiles)


def attained(policy: str, fleet: Fleet, trace: Trace) -> float:
    """Attainment of a policy, planned on the requests that are scored, counted as published."""
    return counted(in_time(fleet, trace, placed(policy, fleet, trace)), trace)


def placed(policy: str, fleet: Fleet, trace: Trace) -> Placement:
    """What a policy of the result files chooses."""
    if policy == "sr-greedy":
        return replication(fleet, [trace])
    if policy == "mp-round-robin":
        return round_robin(fleet, Shape(4))
    judge = Judge(fleet, [trace])
    if policy == "mp-greedy-4":
        return fill(empty([Shape(4)] * (fleet.num_devices // 4)), judge)[0]
    together = find(fleet, [trace], replace(QUICK, most_buckets=1))
    if policy == "mp-search":
        return together.placement
    apart = find(fleet, [trace], QUICK)
    return max(together, apart, key=lambda found: found.verdict.attainment).placement


def large() -> tuple[float, float, float]:
    """60 models on 64 devices: CPU seconds of the search, requests a CPU second, attainment."""
    times = {Shape(n): s for n, s in ROUNDED_S.items()}
    setting = ("mixed", "60", "64", "96", "{'cv': 4}", "5")
    fleet, trace = workload(setting, times)
    start = time.process_time()
    found = find(fleet, [trace])
    took_s = time.process_time() - start
    judge = Judge(fleet, [trace])
    start = time.process_time()
    judge.of(found.placement)
    return took_s, len(trace) / (time.process_time() - start), found.verdict.attainment


def main() -> None:
    """Prints each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--orderings", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="only every N-th setting")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    rows = []
    if options.orderings:
        asked = right = 0
        found = orderings(options.measurements, options.every, options.first)
        for setting, pairs, agreed in found:
            asked, right = asked + pairs, right + agreed
            say(f"{agreed} of {pairs}  {setting}")
        say(f"pairs in the published order: {right} of {asked}, {right / asked:.1%}")
        rows.append(row("orderings of policies", "pairs right", right / asked, 0.85, "higher"))
    else:
        for case, theirs, ours, of_all in the_list(options.measurements):
            say(f"{case:32} AlpaServe {theirs:.4f}  ours {ours:.4f}  of all requests {of_all:.4f}")
            rows.append(row(case, "attainment", ours, theirs, "higher"))
        took_s, per_s, share = large()
        say(f"60 models on 64 devices: {took_s:.1f} CPU s, attainment {share:.3f}")
        say(f"simulated requests a CPU second: {per_s:,.0f}")
        rows.append(row("60 models on 64 devices", "CPU seconds", took_s, 60, "lower"))
    if options.json:
        print(json.dumps({"rows": rows}))


def row(claim: str, metric: str, ours: float, theirs: float, better: str) -> dict[str, object]:
    """One comparison."""
    return {
        "claim": claim,
        "peer": "AlpaServe, published",
        "metric": metric,
        "ours": ours,
        "theirs": theirs,
        "ratio": ours / theirs,
        "better": better,
    }


if __name__ == "__main__":
    main()
