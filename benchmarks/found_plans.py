"""Is the plan that `triptych plan --auto` finds the fastest? All legal uniform plans beside.

Twelve models on 2 or 4 ranks of this machine: two network namespaces are two nodes, their link is
throttled, ranks have a part of a core each, those of the second node often a smaller one. What the
planner knows is measured: a calibration of two ranks (`own_machine.py` makes it, in FOLDER), how
much slower a rank with its part of a core is, the messages over the link.

Every legal uniform plan runs once; the found plan then runs against the best of them in interleaved
pairs. A case counts if the best two ways to split the model (their best plans) differ by 15 % or
more; it is right if the found plan is within 5 % of the best. Runs are kept in FOLDER: a call runs
for `--minutes`, the next one goes on.

    sudo python benchmarks/found_plans.py FOLDER [--minutes 8] [--only WORD] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from own_machine import Folder, calibrate
from sides.cores import shares_of_cores
from sides.namespaces import NODES, on_nodes, require_root, throttle, two_nodes
from sides.own_runs import MODELS, legal_plans, llama, run, step_s
from triptych.cluster.cluster import Cluster, NodeGroup
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import read_cluster, write_cluster
from triptych.measure.calibrated import measured_link
from triptych.measure.drift import PRODUCT, Pace, at_pace
from triptych.measure.figures import link_figures
from triptych.measure.record import Entry
from triptych.measure.watch import Place, Watch
from triptych.model.hf import from_config
from triptych.plan.plan import Plan
from triptych.plan.toml import plan_from_toml, plan_toml
from triptych.plan.workload import Workload
from triptych.search.automatic import answer_automatic
from triptych.search.pins import Pins
from triptych.search.search import Question

PINNED = {"precision": "fp32", "recompute": "none"}
APART, WITHIN, PAIRS = 1.15, 1.05, 5
PROBE_BYTES = 1024
SLOW = 100e6
"""Bit/s up to which one timed step is enough: its time is the link's."""
PRODUCTS_S = 1.0
WHOLE, HALF = (0.9, 0.9), (0.45, 0.45)  # ranks leave something for the kernel


class Case(NamedTuple):
    """A model and its work on two nodes; `shares` are those of a core that ranks of a node have."""

    config: Mapping[str, Any]
    workload: Workload
    bits_per_s: float
    per_node: int = 1
    shares: tuple[float, float] = WHOLE
    microbatches: tuple[int, ...] = (1, 4)

    @property
    def world(self) -> int:
        """Ranks."""
        return NODES * self.per_node

    @property
    def steps(self) -> int:
        """Timed steps of a run."""
        return 1 if self.bits_per_s <= SLOW else 3


EIGHT, LONG = (Workload(sequence_length=length, global_batch=8) for length in (128, 256))
ENDS = llama(128, 4, 32768)
CASES: Mapping[str, Case] = {
    "two nodes, slow link": Case(llama(128, 4, 1024), EIGHT, 10e6),
    "deep, slow link": Case(MODELS["deep"], LONG, 100e6),
    "wide, fast link": Case(MODELS["wide"], EIGHT, 10e9),
    "heavy ends": Case(ENDS, EIGHT, 1e9),
    "deep, a slow core": Case(MODELS["deep"], EIGHT, 1e9, shares=(0.9, 0.4)),
    "deep, a very slow core": Case(MODELS["deep"], LONG, 10e9, shares=(0.9, 0.25)),
    "heavy ends, a slow core": Case(ENDS, EIGHT, 1e9, shares=(0.9, 0.45)),
    "experts, slow link": Case(MODELS["experts"], EIGHT, 100e6),
    "four ranks, deep": Case(MODELS["deep"], EIGHT, 1e9, 2, HALF, (1,)),
    "four ranks, heavy ends": Case(ENDS, EIGHT, 1e9, 2, HALF, (1,)),
    "four ranks, a slow node": Case(MODELS["deep"], LONG, 10e9, 2, (0.45, 0.2), (1,)),
    "four ranks, slow link and node": Case(
        llama(128, 6, 2048), EIGHT, 100e6, 2, (0.45, 0.25), (1,)
    ),
}


class Bench(NamedTuple):
    """A case while its link and its cores are throttled."""

    case: Case
    enter: Callable[[int], None]

    def on_ranks(self, function: Callable[[], Any]) -> list[Any]:
        """The result of a function on each rank of the case."""
        return on_nodes(function, self.case.per_node, self.enter)

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step under a plan."""
        case = self.case
        return step_s(
            self.on_ranks(partial(run, case.config, plan, case.workload, case.steps, PROBE_BYTES))
        )


class Record:
    """What is known of a case, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {"uniform": {}, "found": "", "pairs": []}
        if path.exists():
            self.values = json.loads(path.read_text())

    def keep(self) -> None:
        """Writes it."""
        self.path.write_text(json.dumps(self.values, indent=1))

    @property
    def best(self) -> str:
        """The fastest uniform plan."""
        return min(self.values["uniform"], key=self.values["uniform"].__getitem__)

    @property
    def is_done(self) -> bool:
        """True if all pairs were run, or the found plan is the best uniform one."""
        return bool(self.values["pairs"]) and (
            self.values["found"] == self.best or len(self.values["pairs"]) >= PAIRS
        )

    @property
    def apart(self) -> float:
        """The best plan of the second best way to split the model over that of the best."""
        best: dict[tuple[int, ...], float] = {}
        for text, seconds in self.values["uniform"].items():
            plan = plan_from_toml(text)
            split = (plan.pp, *(getattr(plan, axis) for axis in ("tp", "dp", "cp", "ep")))
            best[split] = min(seconds, best.get(split, seconds))
        first, second, *_ = (*sorted(best.values()), float("inf"), float("inf"))
        return second / first

    @property
    def ratio(self) -> float:
        """The found plan's time over that of the best uniform one: the median of pairs."""
        return statistics.median(ours / theirs for ours, theirs in self.values["pairs"])


# --- what the planner knows -----------------------------------------------------------------------


def known_cluster(folder: Folder, bench: Bench) -> Cluster:
    """The nodes, each as slow as its part of a core makes it, and the link as it is."""
    case, (ranks, reference) = bench.case, folder.calibrated()
    seen = bench.on_ranks(partial(_look, case.per_node))
    entries: dict[str, Entry] = seen[0][1]
    groups = []
    for node in range(NODES):
        own = seen[node * case.per_node : (node + 1) * case.per_node]
        slower = statistics.fmean(product_s for product_s, _ in own) / reference.product_s
        pace = Pace(reference.product_s * slower, reference.operator_s * slower, 1.0)
        paced = at_pace(ranks, reference._replace(message_s=1.0), pace).groups[0]
        link = measured_link(entries, "link", paced.link, "measured")
        groups.append(replace(paced, nodes=1, devices_per_node=case.per_node, link=link))
    network = measured_link(entries, "network", parse_cluster("2x1xcpu").network, "measured")
    return replace(ranks, name="two nodes", groups=_alike(case, groups), network=network)


def _alike(case: Case, groups: list[NodeGroup]) -> tuple[NodeGroup, ...]:
    """One group of two nodes if both have the same part of a core."""
    is_one = case.shares[0] == case.shares[1]
    return (replace(groups[0], nodes=NODES),) if is_one else tuple(groups)


def _look(per_node: int) -> tuple[float, dict[str, Entry]]:
    """Seconds of this rank's product, all ranks busy, and the messages between all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    place = Place(rank=rank, world=world, per_node=per_node, device=torch.device("cpu"))
    watch, entries = Watch(place), {}
    for figure in link_figures(place):
        rows, noise = figure.run(watch)
        entries[figure.name] = Entry(watch.of_all(rows, figure.merge), noise, "")
    watch.together()
    return _product_s(), entries


def _product_s() -> float:
    """Mean seconds of a product, over many periods in which a part of a core is given."""
    rows, inner, columns = PRODUCT
    x, weight, out = torch.ones(rows, inner), torch.ones(columns, inner), torch.empty(rows, columns)
    count, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < PRODUCTS_S:
        torch.mm(x, weight.T, out=out)
        count += 1
    return (time.perf_counter() - start_s) / count


# --- runs -----------------------------------------------------------------------------------------


def question_of(case: Case, cluster: Cluster) -> Question:
    """What is asked."""
    model = from_config(case.config, "model")
    return Question(model=model, cluster=cluster, workload=case.workload, pins=Pins.read(PINNED))


def run_case(folder: Folder, name: str, end_s: float) -> Record:
    """Goes on with a case until it is done or the time is over."""
    case, slug = CASES[name], name.replace(", ", "-").replace(" ", "-")
    record = Record(folder.path / f"found-{slug}.json")
    if record.is_done:
        return record
    throttle(case.bits_per_s)
    shares = [case.shares[rank // case.per_node] for rank in range(case.world)]
    with shares_of_cores(shares) as enter:
        bench = Bench(case, enter)
        path = folder.path / f"found-{slug}.toml"
        if not path.exists():
            path.write_text(write_cluster(known_cluster(folder, bench)))
        question = question_of(case, read_cluster(path))
        _screen(bench, question, record, end_s)
        if time.monotonic() < end_s:
            _pair(bench, question, record, end_s)
    return record


def _screen(bench: Bench, question: Question, record: Record, end_s: float) -> None:
    """Runs every legal uniform plan once."""
    done = record.values["uniform"]
    for plan in legal_plans(question, bench.case.microbatches):
        if time.monotonic() > end_s:
            return
        if plan_toml(plan) not in done:
            done[plan_toml(plan)] = bench.step_s(plan)
            record.keep()


def _pair(bench: Bench, question: Question, record: Record, end_s: float) -> None:
    """Runs the found plan and the best uniform one in turn."""
    values = record.values
    if not values["found"]:
        runnable = answer_automatic(question, top=1).runnable
        assert runnable is not None, "some plan runs"
        values["found"] = plan_toml(runnable.prediction.plan)
    if values["found"] == record.best:
        values["pairs"] = [[values["uniform"][record.best]] * 2]
    found, best = plan_from_toml(values["found"]), plan_from_toml(record.best)
    while not record.is_done and time.monotonic() < end_s:
        values["pairs"].append([bench.step_s(found), bench.step_s(best)])
        record.keep()
    record.keep()


def row_of(name: str, record: Record) -> dict[str, Any]:
    """The figures of a case that is done."""
    theirs_s = statistics.median(theirs for _, theirs in record.values["pairs"])
    return {
        "claim": f"{name}: {plan_from_toml(record.values['found']).short()}",
        "peer": plan_from_toml(record.best).short(),
        "metric": "s a step",
        "ours": record.ratio * theirs_s,
        "theirs": theirs_s,
        "ratio": 1.0 / record.ratio,
        "better": "lower",
        "apart": record.apart,
        "counts": record.apart >= APART,
        "right": record.ratio <= WITHIN,
    }


def report(rows: list[dict[str, Any]], as_json: bool) -> None:
    counted = [row for row in rows if row["counts"]]
    right = sum(row["right"] for row in counted)
    if as_json:
        print(json.dumps({"rows": rows, "right": right, "counted": len(counted)}))
        return
    for row in rows:
        mark = ("right" if row["right"] else "WRONG") if row["counts"] else "close"
        print(f"{mark}  {row['ours']:.4g} against {row['theirs']:.4g} s  {row['claim']}")
        print(f"       best uniform plan {row['peer']}; ways to split {row['apart']:.2f} apart")
    print(f"within {WITHIN - 1:.0%} of the best: {right} of {len(counted)} cases that count")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="a part of the name of a case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    folder = Folder(options.folder)
    if not folder.pace.exists():
        calibrate(folder)
    end_s, rows = time.monotonic() + 60.0 * options.minutes, []
    with two_nodes():
        for name in CASES:
            if options.only in name and time.monotonic() < end_s:
                record = run_case(folder, name, end_s)
                rows += [row_of(name, record)] if record.is_done else []
    report(rows, options.json)


if __name__ == "__main__":
    main()
