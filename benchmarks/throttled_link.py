"""Which way to split a model is fastest over a slow link? Predicted beside measured.

Two network namespaces of this machine are two nodes of one rank each, joined by a link that is
throttled to 10 Mbit/s ... 10 Gbit/s. For each speed and model, data parallelism, ZeRO-3, tensor and
pipeline parallelism are predicted and then run, those that may be the fastest three times in turn.
What the planner knows: a calibration of the ranks (`own_machine.py` makes it, in FOLDER), and the
messages over the link as `triptych measure` takes them. Cases are kept in FOLDER; the next call
goes on with those that are missing.

    sudo python benchmarks/throttled_link.py FOLDER [--minutes 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from own_machine import Folder, calibrate
from sides.namespaces import NODES, on_nodes, require_root, throttle, two_nodes
from sides.own_runs import llama, run, step_s
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import read_cluster, write_cluster
from triptych.cost.predict import predict
from triptych.measure.calibrated import measured_link
from triptych.measure.drift import Pace, at_pace, mean_pace
from triptych.measure.figures import link_figures
from triptych.measure.record import Entry
from triptych.measure.watch import Place, Watch
from triptych.model.hf import from_config
from triptych.plan.short import parse_plan
from triptych.plan.workload import Workload

PLANS = {
    "DP": "dp=2,microbatch={m}",
    "ZeRO-3": "dp=2,zero=3,microbatch={m}",
    "TP": "tp=2,microbatch={m}",
    "PP": "pp=2,microbatch={m}",
}


class Scene(NamedTuple):
    """A model and the work of a step."""

    config: dict[str, Any]
    workload: Workload
    microbatch: int


SCENES: Mapping[str, Scene] = {
    "balanced": Scene(llama(128, 4, 1024), Workload(sequence_length=128, global_batch=4), 1),
    "many tokens": Scene(llama(64, 6, 512), Workload(sequence_length=256, global_batch=32), 8),
    "many weights": Scene(llama(512, 4, 2048), Workload(sequence_length=64, global_batch=4), 2),
}
CASES = (
    ("balanced", 10e6),
    ("balanced", 100e6),
    ("balanced", 1e9),
    ("balanced", 10e9),
    ("many tokens", 10e6),
    ("many tokens", 100e6),
    ("many tokens", 1e9),
    ("many weights", 100e6),
    ("many weights", 1e9),
    ("many weights", 10e9),
)
ROUNDS, CLOSE = 3, 1.5
"""Plans that may be the fastest run so often, in turn; those slower by such a factor once."""

PROBE_BYTES = 1024
"""Of the messages that tell the machine's pace: over a slow link longer ones would take minutes."""

SLOW = 100e6
"""Up to this speed one timed step is enough: its time is the link's."""


def link_of(folder: Folder, bits_per_s: float) -> Cluster:
    """The two nodes, their link as measured at the speed it has now."""
    path = folder.path / f"link-{bits_per_s:.0f}.toml"
    if not path.exists():
        entries: dict[str, Entry] = on_nodes(_messages)[0]
        ranks, _ = folder.calibrated()
        group = replace(ranks.groups[0], nodes=NODES, devices_per_node=1)
        bare = parse_cluster(f"{NODES}x1xcpu").network
        network = measured_link(entries, "network", bare, f"measured at {bits_per_s:.0f} bit/s")
        cluster = replace(ranks, name="two namespaces", groups=(group,), network=network)
        path.write_text(write_cluster(cluster))
    return read_cluster(path)


def _messages() -> dict[str, Entry]:
    place = Place(rank=dist.get_rank(), world=NODES, per_node=1, device=torch.device("cpu"))
    watch, found = Watch(place), {}
    for figure in link_figures(place):
        rows, noise = figure.run(watch)
        found[figure.name] = Entry(watch.of_all(rows, figure.merge), noise, "")
    return found


def run_case(folder: Folder, name: str, bits_per_s: float) -> dict[str, Any]:
    """The plans of a case, measured, and the pace that the machine had."""
    throttle(bits_per_s)
    link_of(folder, bits_per_s)
    scene = SCENES[name]
    steps = 1 if bits_per_s <= SLOW else 5
    plans = {k: f"{text.format(m=scene.microbatch)},precision=fp32" for k, text in PLANS.items()}
    steps_s: dict[str, list[float]] = {label: [] for label in plans}
    paces: dict[str, list[Pace]] = {label: [] for label in plans}
    for _ in range(ROUNDS):
        best_s = min((min(found) for found in steps_s.values() if found), default=math.inf)
        for label, plan in plans.items():
            if min(steps_s[label], default=0.0) <= CLOSE * best_s:
                asked = scene.config, plan, scene.workload, steps, PROBE_BYTES
                ranks = on_nodes(partial(run, *asked))
                steps_s[label].append(step_s(ranks))
                paces[label] += [rank.pace for rank in ranks]
    return {
        "scene": name,
        "bits_per_s": bits_per_s,
        "plans": {
            label: {
                "step_s": statistics.median(steps_s[label]),
                "plan": plan,
                "pace": list(mean_pace(paces[label])),
            }
            for label, plan in plans.items()
        },
    }


def predicted(folder: Folder, case: Mapping[str, Any]) -> dict[str, float]:
    """Predicted step times of a case. The link does not drift: it is throttled."""
    cluster = link_of(folder, case["bits_per_s"])
    _, reference = folder.calibrated()
    scene = SCENES[case["scene"]]
    model = from_config(scene.config, case["scene"])
    paces = [Pace(*ran["pace"]) for ran in case["plans"].values()]
    now = mean_pace(paces)._replace(message_s=reference.message_s)
    at_now = at_pace(cluster, reference, now)
    return {
        label: predict(model, at_now, scene.workload, parse_plan(ran["plan"], model)).step_time_s
        for label, ran in case["plans"].items()
    }


def report(folder: Folder, cases: list[dict[str, Any]], as_json: bool) -> None:
    rows = []
    for case in cases:
        measured = {label: ran["step_s"] for label, ran in case["plans"].items()}
        guessed = predicted(folder, case)
        best, choice = (
            min(measured, key=measured.__getitem__),
            min(guessed, key=guessed.__getitem__),
        )
        rows.append(
            {
                "claim": f"{case['scene']}, {case['bits_per_s'] / 1e6:g} Mbit/s: fastest plan",
                "peer": "measured",
                "metric": "s per step of the choice over the best",
                "ours": measured[choice],
                "theirs": measured[best],
                "ratio": measured[choice] / measured[best],
                "better": "lower",
            }
        )
        if not as_json:
            figures = ", ".join(
                f"{label} {guessed[label]:.3g}/{measured[label]:.3g}" for label in measured
            )
            print(f"{rows[-1]['claim']:46} {choice:7} {best:7} {figures}")
    right = sum(row["ratio"] == 1.0 for row in rows)
    if as_json:
        print(json.dumps({"rows": rows, "right": right, "cases": len(rows)}))
    else:
        print(f"predicted winner is the measured winner: {right} of {len(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    folder = Folder(options.folder)
    if not folder.pace.exists():
        calibrate(folder)
    kept = folder.path / "link-cases.jsonl"
    cases = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(case["scene"], case["bits_per_s"]) for case in cases}
    end_s = time.monotonic() + 60.0 * options.minutes
    with two_nodes():
        for name, bits_per_s in CASES:
            if (name, bits_per_s) in done or time.monotonic() > end_s:
                continue
            cases.append(run_case(folder, name, bits_per_s))
            with kept.open("a") as file:
                file.write(json.dumps(cases[-1]) + "\n")
    report(folder, cases, options.json)


if __name__ == "__main__":
    main()
