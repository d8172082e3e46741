"""`triptych plan --sweep`: the same question for several clusters, batches or sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triptych.cli.answer import Answer, say
from triptych.cli.inputs import training_workload
from triptych.cluster.cluster import Cluster
from triptych.model.model import Model
from triptych.report.sweep import sweep_table
from triptych.search.objective import Objective
from triptych.search.result import SearchResult
from triptych.search.search import search
from triptych.search.sweep import Point, best_row, cluster_at, front_rows, points, rows

Prices = Callable[[Cluster], float | None]


def sweep(
    model: Model,
    cluster: Cluster,
    sequence: int | None,
    batch: int | None,
    *,
    grid: Mapping[str, list[str]],
    fixed: Mapping[str, str],
    objective: Objective,
    spare: float,
    price_of: Prices,
    report: Path | None = None,
) -> Answer:
    """The table of a sweep. Exit code 2 if no point of it has a plan."""

    def ask(point: Point) -> tuple[int, SearchResult]:
        where = cluster_at(cluster, point)
        length = int(point["seq"]) if "seq" in point else sequence
        size = int(point["batch"]) if "batch" in point else batch
        workload = training_workload(model, where, length, size)
        say("  " + ", ".join(f"{key}={value}" for key, value in point.items()))
        here = Objective(name=objective.name, price=price_of(where))
        result = search(model, where, workload, fixed=fixed, top=1, objective=here, spare=spare)
        return where.num_devices, result

    documents = [row.to_json() for row in rows(points(grid), ask)]
    document = {
        "model": model.name,
        "cluster": cluster.name,
        "objective": objective.name,
        "sweep": list(grid),
        "rows": documents,
        "best": best_row(documents, objective),
        "front": front_rows(documents),
    }
    if report:
        _write(report, document)
    heading = f"model     {model.name}\ncluster   {cluster.name}\nsweep     {', '.join(grid)}"
    has_plan = any(row["plan"] for row in documents)
    text = f"{heading}\n\n{sweep_table(document)}"
    return Answer(text=text, document=document, exit_code=0 if has_plan else 2)


def _write(report: Path, document: Mapping[str, Any]) -> None:
    from triptych.report.sweep_page import write_sweep

    say(f"wrote {write_sweep(document, report)}")
