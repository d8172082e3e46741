"""Stages of their own (`triptych plan --auto`) beside Alpa, uniform plans and measured orders.

* `cold`: processor seconds of the whole command for GPT-39B on 64 V100s, a new process, imports
  included; Alpa's took 2,393 s on its cluster (Zheng et al. 2022, "Alpa", table 5).
* `mixed`: predicted step time on clusters of two kinds of devices over that of the best uniform
  plan: of the `--uniform` first that the search ranks, each priced with its stages on their own
  devices.
* `orders`: of pairs of Alpa's measured runs (rows `alpa*` of MEASUREMENTS/training.csv), how many
  the cost model puts in the measured order.

    python benchmarks/auto_plans.py [MEASUREMENTS] [--only cold|mixed|orders] [--json]
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.cluster.text import parse_cluster
from triptych.cost.predict import predict
from triptych.model.load import load_model
from triptych.plan.workload import Workload
from triptych.search.automatic import answer_automatic
from triptych.search.pins import Pins
from triptych.search.search import Question, answer
from triptych.validate.train import validate_training

FLOOR_S, ALPA_S, COLD_RUNS = 10.0, 2393.0, 3
COLD = (
    *("plan", "Megatron-39B(PTD)", "--cluster", "8x8xV100-SXM2-16GB", "--auto"),
    *("--seq", "1024", "--batch", "1024", "--json"),
)
RIGHT = 0.85


class Mixed(NamedTuple):
    """A model on two kinds of devices."""

    model: str
    cluster: str
    sequence: int
    batch: int


MIXED = (
    Mixed("llama-2-13b", "1x8xA100-80+1x8xV100-32", 2048, 64),
    Mixed("llama-2-7b", "1x4xA100-80+1x4xV100-32", 2048, 64),
    Mixed("gpt-3-13b", "1x8xA100-40+2x8xV100-32", 2048, 128),
    Mixed("gpt-3-6.7b", "1x8xA100-40+1x8xV100-16", 1024, 128),
    Mixed("llama-3.1-8b", "1x8xH100-SXM+1x8xA100-80", 4096, 64),
    Mixed("qwen2.5-14b", "1x4xH100-SXM+1x4xA100-80", 4096, 32),
    Mixed("llama-3.1-70b", "2x8xH100-SXM+2x8xA100-80", 4096, 128),
    Mixed("qwen2.5-32b", "2x8xA100-80+2x8xA100-40", 4096, 64),
    Mixed("mixtral-8x7b-v0.1", "1x8xH100-SXM+1x8xA100-80", 4096, 64),
    Mixed("gpt-2-xl", "1x2xA100-80+1x2xL40S", 1024, 64),
)


def cold_row() -> dict[str, Any]:
    """The command in new processes: the quickest."""
    seconds = []
    for _ in range(COLD_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "triptych", *COLD], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "claim": "GPT-39B on 8x8 V100-16, whole command",
        "peer": "Alpa",
        "metric": "processor s",
        "ours": min(seconds),
        "theirs": ALPA_S,
        "ratio": ALPA_S / min(seconds),
        "better": "lower",
        "passes": min(seconds) <= FLOOR_S,
    }


def mixed_row(case: Mixed, uniform: int) -> dict[str, Any]:
    """The found plan over the best uniform one, both on the devices that they have."""
    model, cluster = load_model(case.model), parse_cluster(case.cluster)
    workload = Workload(sequence_length=case.sequence, global_batch=case.batch)
    question = Question(model=model, cluster=cluster, workload=workload, pins=Pins.read({}))
    ranked = answer(question, top=uniform).plans
    priced = (predict(model, cluster, workload, one.prediction.plan) for one in ranked)
    theirs_s = min((one.step_time_s for one in priced if one.fits), default=float("inf"))
    best = answer_automatic(question, top=1).plans[0].prediction
    return {
        "claim": f"{case.model} on {case.cluster}: {best.plan.short()}",
        "peer": "best uniform plan",
        "metric": "predicted s a step",
        "ours": best.step_time_s,
        "theirs": theirs_s,
        "ratio": theirs_s / best.step_time_s,
        "better": "lower",
        "passes": best.fits and best.step_time_s < theirs_s,
    }


def orders_row(measurements: Path) -> dict[str, Any]:
    """Pairs of Alpa's runs in the measured order."""
    with (
        (measurements / "training.csv").open(newline="", encoding="utf-8") as file,
        tempfile.NamedTemporaryFile("w", suffix=".csv", newline="", encoding="utf-8") as alpa,
    ):
        reader = csv.DictReader(file)
        writer = csv.DictWriter(alpa, list(reader.fieldnames or ()))
        writer.writeheader()
        writer.writerows(row for row in reader if row["id"].startswith("alpa"))
        alpa.flush()
        found = validate_training(Path(alpa.name)).document["ranking"]
    return {
        "claim": f"order of Alpa's runs: {found['agree']} of {found['pairs']} pairs",
        "peer": "measured",
        "metric": "share of pairs right",
        "ours": found["agree_share"],
        "theirs": 1.0,
        "ratio": found["agree_share"],
        "better": "higher",
        "passes": found["agree_share"] >= RIGHT,
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is asked for."""
    if options.only in ("", "cold"):
        yield cold_row()
    if options.only in ("", "orders") and options.measurements:
        yield orders_row(options.measurements)
    if options.only in ("", "mixed"):
        for case in MIXED:
            yield mixed_row(case, options.uniform)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", type=Path, nargs="?")
    parser.add_argument("--only", choices=("cold", "mixed", "orders"), default="")
    parser.add_argument("--uniform", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for row in rows(options):
        found.append(row)
        if not options.json:
            mark = "pass" if row["passes"] else "FAIL"
            figures = f"{row['ours']:9.4g} against {row['theirs']:9.4g}, ratio {row['ratio']:.3f}"
            print(f"{mark}  {figures}  {row['claim']}", flush=True)
    if options.json:
        print(json.dumps({"rows": found}))


if __name__ == "__main__":
    main()
