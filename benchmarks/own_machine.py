"""Predicted beside measured on this machine: all legal plans of four small models on two ranks.

The machine is calibrated with `triptych measure`'s own figures; then every plan is trained a few
steps with the real runtime, and predicted from the calibration. Machines drift: short probes of the
pace of products, memory and messages are taken at the calibration and around every run, and the
prediction of a run is for the pace at that time.

Step times need the machine alone; peak bytes of tensors (`--kind bytes`) do not. Figures are kept
in a folder, a line each: a call runs for `--minutes`, the next one goes on. It prints the errors of
step time and of peak bytes, what the planner's choice costs where the best two plans differ by 15 %
or more, and writes `runs.csv`, a table for `triptych validate`.

    python benchmarks/own_machine.py FOLDER [--minutes 4] [--kind time|bytes] [--calibrate]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist

from sides.own_runs import MODELS, WORKLOAD, Ran, peak_bytes, plans, run, step_s
from sides.ranks import on_ranks
from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.cluster.toml import read_cluster
from triptych.cost.predict import predict
from triptych.measure.drift import Pace, at_pace, mean_pace, pace
from triptych.measure.run import Order, measure
from triptych.measure.watch import Place, Watch
from triptych.model.hf import from_config
from triptych.model.model import Model
from triptych.plan.short import parse_plan
from triptych.units import GIB

RANKS = 2
PROBES = 5
"""Of the pace, before and after a calibration: all predictions are relative to their median."""

APART = 1.15
"""Only where the best two plans differ by so much is there something to choose."""


class Paired(NamedTuple):
    """A run beside its prediction."""

    model: str
    plan: str
    step_s: float
    predicted_s: float
    bytes: float
    predicted_bytes: float


class Folder:
    """What was calibrated and run so far."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.cluster, self.pace = path / "cluster.toml", path / "pace.json"
        self.path, self.table = path, path / "runs.csv"

    def done(self, kind: str) -> list[dict[str, Any]]:
        """The figures of a kind so far."""
        kept = self.path / f"{kind}.jsonl"
        return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Keeps a figure."""
        with (self.path / f"{kind}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def calibrated(self) -> tuple[Cluster, Pace]:
        """The calibration, and the machine's pace at that time."""
        return read_cluster(self.cluster), Pace(*json.loads(self.pace.read_text()))


def calibrate(folder: Folder) -> None:
    """Measures the machine on all ranks."""
    on_ranks(RANKS, partial(_calibrate, folder))


def _calibrate(folder: Folder) -> None:
    rank = dist.get_rank()
    place = Place(rank=rank, world=RANKS, per_node=RANKS, device=_cpu())
    watch = Watch(place)
    paces = [pace(watch) for _ in range(PROBES)]
    order = Order(out=folder.cluster, dtypes=("fp32",), again=folder.cluster.exists())
    measure(order, RANKS, lambda text: None)
    paces += [pace(watch) for _ in range(PROBES)]
    if rank == 0:
        usual = [statistics.median(seconds) for seconds in zip(*paces, strict=True)]
        folder.pace.write_text(json.dumps(usual))


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def left(folder: Folder, kind: str, only: str) -> list[tuple[str, str]]:
    """Models and plans of which a kind of figure is not there, in a mixed order."""
    done = {(entry["model"], entry["plan"]) for entry in folder.done(kind)}
    cluster = parse_cluster(f"1x{RANKS}xcpu")
    todo = [
        (name, plan.short())
        for name in MODELS
        if only in name
        for plan in plans(name, cluster)
        if (name, plan.short()) not in done
    ]
    random.Random(0).shuffle(todo)  # so that drift is no plan's fault
    return todo


def figure(kind: str, name: str, plan: str) -> dict[str, Any]:
    """One figure of a plan, which runs for it."""
    if kind == "bytes":
        return {"bytes": max(on_ranks(RANKS, partial(peak_bytes, MODELS[name], plan)))}
    ranks: list[Ran] = on_ranks(RANKS, partial(run, MODELS[name], plan))
    return {"step_s": step_s(ranks), "pace": list(mean_pace([rank.pace for rank in ranks]))}


def run_for(folder: Folder, kind: str, minutes: float, only: str) -> int:
    """Runs plans that have not run for so many minutes; returns how many are left."""
    todo = left(folder, kind, only)
    end_s = time.monotonic() + 60.0 * minutes
    for number, (name, plan) in enumerate(todo):
        if time.monotonic() > end_s:
            return len(todo) - number
        folder.add(kind, {"model": name, "plan": plan, **figure(kind, name, plan)})
    return 0


def paired(folder: Folder) -> list[Paired]:
    """Every timed run beside its prediction, at its own pace."""
    cluster, reference = folder.calibrated()
    sizes = {(e["model"], e["plan"]): e["bytes"] for e in folder.done("bytes")}
    return [
        _paired(
            entry,
            sizes.get((entry["model"], entry["plan"]), 0),
            at_pace(cluster, reference, Pace(*entry["pace"])),
        )
        for entry in folder.done("time")
    ]


def _paired(entry: dict[str, Any], size_bytes: int, cluster: Cluster) -> Paired:
    name = entry["model"]
    model = from_config(MODELS[name], name)
    found = predict(model, cluster, WORKLOAD, parse_plan(entry["plan"], model))
    tensors = (found.peak_memory_gib - sum(found.overhead_gib.values())) * GIB
    plan, measured_s = entry["plan"], entry["step_s"]
    return Paired(name, plan, measured_s, found.step_time_s, size_bytes, tensors)


def choice_loss(pairs: Sequence[Paired], cluster: Cluster) -> list[tuple[str, float]]:
    """For each model whose best two plans differ enough: time lost by the plan that the planner
    would take, all predicted at one pace.
    """
    losses = []
    for name in MODELS:
        mine = [pair for pair in pairs if pair.model == name]
        if len(mine) < 2:
            continue
        model = from_config(MODELS[name], name)
        for group in _groups([_at_pace_of(pair, cluster, model) for pair in mine]):
            times = sorted(pair.step_s for pair in group)
            if times[1] >= APART * times[0]:
                chosen = min(group, key=lambda pair: pair.predicted_s)
                losses.append((name, chosen.step_s / times[0] - 1.0))
    return losses


def _at_pace_of(pair: Paired, cluster: Cluster, model: Model) -> Paired:
    """A run and its prediction as they would be at the pace of a cluster."""
    plan = parse_plan(pair.plan, model)
    there_s = predict(model, cluster, WORKLOAD, plan).step_time_s
    factor = there_s / pair.predicted_s
    return pair._replace(step_s=pair.step_s * factor, predicted_s=there_s)


def _groups(pairs: Sequence[Paired]) -> Iterator[list[Paired]]:
    """Choices to make: among all plans, and among the best of each way to split the model."""
    yield list(pairs)
    best: dict[str, Paired] = {}
    for pair in pairs:
        key = ",".join(pair.plan.split(",")[:3])
        if key not in best or pair.step_s < best[key].step_s:
            best[key] = pair
    if len(best) > 1:
        yield list(best.values())


def errors(pairs: Sequence[Paired]) -> tuple[list[float], list[float]]:
    """Signed relative errors of step time and of memory."""
    return (
        [pair.predicted_s / pair.step_s - 1.0 for pair in pairs],
        [pair.predicted_bytes / pair.bytes - 1.0 for pair in pairs if pair.bytes],
    )


def median_error(values: Sequence[float]) -> float:
    """The median size of errors; none of none."""
    return statistics.median(map(abs, values)) if values else 0.0


def write_table(folder: Folder, pairs: Sequence[Paired]) -> None:
    """The runs as a table that `triptych validate` reads."""
    rows = []
    for number, pair in enumerate(pairs):
        config = folder.path / f"{pair.model}.json"
        config.write_text(json.dumps(MODELS[pair.model]))
        plan = parse_plan(pair.plan, from_config(MODELS[pair.model], pair.model))
        if plan.schedule not in ("1f1b", "interleaved") or plan.accumulation != "auto":
            continue  # columns of a table do not say more
        stage = plan.stages[0]
        rows.append(
            {
                "id": f"{pair.model}-{number:03}",
                "model_name": str(config),
                "gpu": str(folder.cluster),
                "n_gpus": RANKS,
                "seq_len": WORKLOAD.sequence_length,
                "global_batch_size": WORKLOAD.global_batch,
                "dp": stage.data,
                "tp": stage.tensor,
                "pp": plan.pp,
                "ep": stage.expert,
                "vpp_chunks": plan.chunks,
                "zero_stage": plan.zero,
                "sequence_parallel": int(plan.sequence_parallel),
                "recompute": plan.recompute,
                "precision": "fp32",
                "micro_batch_size": plan.microbatch,
                "iteration_time_s": pair.step_s,
                "notes": "triptych",
            }
        )
    with folder.table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def report(folder: Folder, as_json: bool) -> None:
    pairs = paired(folder)
    if not pairs:
        return
    write_table(folder, pairs)
    losses = choice_loss(pairs, folder.calibrated()[0])
    time_errors, memory_errors = errors(pairs)
    rows = [
        _row("step time, median error", median_error(time_errors)),
        _row("peak bytes of tensors, median error", median_error(memory_errors)),
    ]
    if losses:
        rows.append(_row("time lost by the choice", statistics.fmean(x for _, x in losses)))
    if as_json:
        print(json.dumps({"rows": rows, "runs": len(pairs)}))
        return
    _print(pairs)
    print("losses of the choice:", ", ".join(f"{name} {loss:.1%}" for name, loss in losses))
    for row in rows:
        print(f"{row['claim']:40} {row['ours']:.1%}  ({len(pairs)} runs)")


def _row(claim: str, value: float) -> dict[str, Any]:
    return {
        "claim": claim,
        "peer": "measured",
        "metric": "relative error",
        "ours": value,
        "theirs": 0.0,
        "ratio": 1.0 + value,
        "better": "lower",
    }


def _print(pairs: Sequence[Paired]) -> None:
    """Errors by model and way to split it."""
    print(f"{'model':12}{'split':18}{'runs':>5}{'time':>8}{'bias':>8}{'memory':>8}{'bias':>8}")
    keys = dict.fromkeys((pair.model, _split(pair)) for pair in pairs)
    for model, split in sorted(keys):
        mine = [pair for pair in pairs if (pair.model, _split(pair)) == (model, split)]
        times, sizes = errors(mine)
        print(
            f"{model:12}{split:18}{len(mine):5}{median_error(times):8.1%}"
            f"{statistics.median(times):+8.1%}{median_error(sizes):8.1%}"
            f"{statistics.median(sizes or [0.0]):+8.1%}"
        )


def _split(pair: Paired) -> str:
    words = dict(word.split("=") for word in pair.plan.split(","))
    axis = next((a for a in ("tp", "pp", "dp") if words.get(a) == "2"), "dp")
    if axis == "dp":
        return f"dp, zero {words.get('zero', 0)}"
    if axis == "pp":
        return words.get("schedule", "1f1b")
    return "tp, sequence" if words.get("sp") else "tp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="of runs in this call")
    parser.add_argument("--kind", choices=("time", "bytes"), default="time", help="what to measure")
    parser.add_argument("--calibrate", action="store_true", help="calibrate again first")
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Folder(options.folder)
    if options.calibrate or (options.kind == "time" and not folder.pace.exists()):
        calibrate(folder)
    missing = 0
    if options.minutes:
        missing = run_for(folder, options.kind, options.minutes, options.only)
    if folder.pace.exists():
        report(folder, options.json)
    if missing and not options.json:
        print(f"{missing} plans are left: the same command goes on")


if __name__ == "__main__":
    main()
