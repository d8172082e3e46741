"""Placements beside AlpaServe's: its published request list, another seed, and its result files.

python benchmarks/alpaserve.py MEASUREMENTS [--orderings] [--every N] [--json]

MEASUREMENTS is a folder with `alpaserve_workload_8dev.csv` and `alpaserve_results.csv`. Its figures
on the list are AlpaServe's own code's; stage times, memory and the rules of counting are those of
`alpaserve_bert1.3b_stage_latency.csv` and of triptych.simulate.single_shot. `--orderings` makes the
Gamma workloads of the result files anew and asks which of two policies serves more; other models
than BERT-1.3B take the latencies of the paper's Table 1, split as that one's were measured.
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

from triptych.fleet.baselines import replaced, replication, round_robin
from triptych.fleet.find import Effort, find, fixed
from triptych.fleet.greedy import fill
from triptych.fleet.judge import Judge
from triptych.fleet.models import Fleet, Served, Shape, evenly
from triptych.fleet.placement import empty
from triptych.simulate.arrivals import Window, draw_models, power_law_shares
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
QUICK = Effort(sample=3000, finalists=1, trials=0, slack=1)


def the_list(folder: Path) -> Iterator[tuple[str, float, float]]:
    """(case, AlpaServe's attainment or the floor, ours) on the published list."""
    trace = read_trace(folder / "alpaserve_workload_8dev.csv")
    fleet = like_bert(trace, ROUNDED_S)
    judge = Judge(fleet, [trace])
    yield "search", 0.8348, find(fleet, [trace], SEARCH).verdict.attainment
    for stages, theirs in ((2, 0.7473), (4, 0.8348)):
        found = fixed(fleet, [trace], Shape(stages), SEARCH)
        yield f"groups of {stages}", theirs, found.verdict.attainment
    measured = like_bert(trace, stage_times(folder))
    for name, times in (("rounded", fleet), ("measured", measured)):
        found = fixed(times, [trace], Shape(8), Effort(trials=0))
        yield f"groups of 8, {name} stage times", 0.8095, found.verdict.attainment
    yield "replication", 0.6443, judge.of(replication(fleet, [trace])).attainment
    anew = replaced(fleet, trace, 60, clairvoyant=True)
    yield "replication anew every 60 s", 0.6772, anew.attainment
    others = [another_seed(trace, seed) for seed in (1, 2, 3)]
    blind = find(fleet, others, replace(SEARCH, trials=800)).placement
    yield "planned on other seeds (floor)", 0.82, judge.of(blind).attainment


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


def orderings(folder: Path, every: int) -> Iterator[tuple[str, int, int]]:
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
    for key in sorted(settings)[::every]:
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
    shares = power_law_shares(len(models), 0.5)
    windows = [Window(200, float(rate), float(ast.literal_eval(arrival)["cv"]))]
    arrival_s, model = draw_models(windows, shares, np.random.default_rng(0))
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
    """Attainment of a policy, planned on the requests that are scored, as published."""
    judge = Judge(fleet, [trace])
    if policy.startswith("sr-replace"):
        return replaced(fleet, trace, float(policy.split("-")[2]), clairvoyant=True).attainment
    if policy == "sr-greedy":
        return judge.of(replication(fleet, [trace])).attainment
    if policy == "mp-round-robin":
        return judge.of(round_robin(fleet, Shape(4))).attainment
    if policy == "mp-greedy-4":
        groups = empty([Shape(4)] * (fleet.num_devices // 4))
        return fill(groups, judge, at_once=max(1, len(groups.groups) // 2))[1].attainment
    parted = policy == "mp-search-sep"
    return find(
        fleet, [trace], QUICK if parted else replace(QUICK, most_buckets=1)
    ).verdict.attainment


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
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    rows = []
    if options.orderings:
        asked = right = 0
        for setting, pairs, agreed in orderings(options.measurements, options.every):
            asked, right = asked + pairs, right + agreed
            say(f"{agreed} of {pairs}  {setting}")
        say(f"pairs in the published order: {right} of {asked}, {right / asked:.1%}")
        rows.append(row("orderings of policies", "pairs right", right / asked, 0.85, "higher"))
    else:
        for case, theirs, ours in the_list(options.measurements):
            say(f"{case:40} AlpaServe {theirs:.4f}  ours {ours:.4f}")
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
