"""The same question for several sizes of the cluster, devices, batches or sequence lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.cluster.text import parse_cluster
from triptych.errors import InputError, Problem, nearest
from triptych.search.objective import Objective
from triptych.search.result import SearchResult

KEYS = ("gpus", "device", "seq", "batch")

Point = Mapping[str, str]
"""A value for each key that is swept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A point of a sweep and its answer; `problem` says why there is none."""

    point: Point
    devices: int
    result: SearchResult | None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The point, the figures of its best plan and what they cost."""
        document: dict[str, Any] = {**self.point, "devices": self.devices, "problem": self.problem}
        if self.result is None or not self.result.plans:
            return document | {"plan": None}
        best = self.result.to_json()["plans"][0]
        speed = best["tokens_per_s_per_gpu"]
        figures = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib")
        costs = [key for key in best if key.endswith("per_billion_tokens")]
        document |= {key: best[key] for key in (*figures, *costs)}
        return document | {
            "plan": best["plan"]["short"],
            "tokens_per_s": speed * self.devices,
            "legal": self.result.legal,
            "search_time_s": self.result.search_time_s,
        }


def read_sweep(words: Sequence[str]) -> dict[str, list[str]]:
    """`gpus=8,16` and `seq=4096,8192` as keys and values. Raises InputError with every bad word."""
    sweep: dict[str, list[str]] = {}
    problems = []
    for word in words:
        key, equals, values = word.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if key not in KEYS:
            close = nearest(key, KEYS) or KEYS
            rule = f"a sweep is over {', '.join(KEYS)}"
            problems.append(Problem(f"--sweep {word}", rule, f"{close[0]}=..."))
        elif not equals or not listed:
            problems.append(Problem(f"--sweep {word}", "a sweep has values", f"{key}=8,16"))
        elif key != "device" and (bad := [v for v in listed if not _is_count(v)]):
            rule = f"{key} is a whole number from 1"
            problems.append(Problem(f"--sweep {key}={','.join(bad)}", rule, f"{key}=8,16"))
        else:
            sweep[key] = listed
    if problems:
        raise InputError(problems)
    return sweep


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def points(sweep: Mapping[str, Sequence[str]]) -> list[Point]:
    """The grid, in the order in which it was written."""
    return [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]


def cluster_at(cluster: Cluster, point: Point) -> Cluster:
    """The cluster of a point. Raises InputError for counts that do not fill nodes."""
    if not {"gpus", "device"} & point.keys():
        return cluster
    if len(cluster.groups) > 1:
        rule = "a sweep over gpus or device has a cluster of one kind of node"
        raise InputError(Problem(f"--sweep with {cluster.name}", rule, "8x8xH100-SXM"))
    (group,) = cluster.groups
    count = int(point.get("gpus", cluster.num_devices))
    per_node = min(count, group.devices_per_node)
    if count % per_node:
        below = count - count % per_node
        raise InputError(
            Problem(
                f"gpus={count} in nodes of {per_node}",
                "devices fill whole nodes",
                f"gpus={below} or gpus={below + per_node}",
            )
        )
    name = point.get("device", group.device.name)
    if name != group.device.name:
        return parse_cluster(f"{count // per_node}x{per_node}x{name}")
    nodes = replace(group, nodes=count // per_node, devices_per_node=per_node)
    return replace(cluster, groups=(nodes,), name=f"{nodes.nodes}x{per_node}x{name}")


def rows(grid: Sequence[Point], ask: Callable[[Point], tuple[int, SearchResult]]) -> Iterator[Row]:
    """The answer at each point; what cannot be asked there becomes its problem."""
    for point in grid:
        try:
            devices, result = ask(point)
        except InputError as error:
            problem = "; ".join(f"{p.what}, works: {p.works}" for p in error.problems)
            yield Row(point=point, devices=int(point.get("gpus", 0)), result=None, problem=problem)
            continue
        problem = "" if result.plans else _nothing(result)
        yield Row(point=point, devices=devices, result=result, problem=problem)


def _nothing(result: SearchResult) -> str:
    if result.closest is None:
        return "no plan fits"
    return f"no plan fits: {result.closest.over_bytes} bytes too many on each device"


def best_row(documents: Sequence[Mapping[str, Any]], objective: Objective) -> int | None:
    """The index of the best row for an objective: per token, since batches may differ."""
    keys = {
        "time": lambda row: -row["tokens_per_s"],
        "memory": lambda row: row["peak_memory_gib"],
        "gpu-hours": lambda row: row["gpu_hours_per_billion_tokens"],
        "money": lambda row: row["cost_per_billion_tokens"],
    }
    fitting = [index for index, row in enumerate(documents) if row["plan"]]
    return min(fitting, key=lambda i: keys[objective.name](documents[i]), default=None)


def front_rows(documents: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rows than which none is faster with as few devices, by fewest devices first."""
    fitting = [index for index, row in enumerate(documents) if row["plan"]]
    order = sorted(fitting, key=lambda i: (documents[i]["devices"], -documents[i]["tokens_per_s"]))
    front: list[int] = []
    for index in order:
        if not front or documents[index]["tokens_per_s"] > documents[front[-1]]["tokens_per_s"]:
            front.append(index)
    return front
