"""When no serving plan meets the objectives: what the nearest one lacks, and changes that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.predict import ServingPrediction
from triptych.plan.serving import ServingWorkload
from triptych.search.serving import ServingQuestion, search_serving
from triptych.units import format_bytes, format_seconds

GROWTH = (2, 4, 8)
"""Times as many nodes that are tried."""


def lacks(nearest: ServingPrediction, workload: ServingWorkload) -> list[str]:
    """What the nearest plan falls short of, in numbers."""
    if not nearest.fits:
        over = math.ceil(nearest.over_bytes)
        return [f"one sequence lacks {format_bytes(over)} ({over} bytes) a device"]
    lines = []
    if workload.ttft_s and not nearest.meets.get("ttft", True):
        lines.append(_late("first token", nearest.ttft_s, workload.ttft_s))
    if workload.tpot_s and not nearest.meets.get("tpot", True):
        lines.append(_late("tokens", nearest.tpot_s, workload.tpot_s))
    if workload.rate and not nearest.meets.get("rate", True):
        most = nearest.max_requests_per_s
        lines.append(f"it answers {most:.3g} requests/s at most, {workload.rate:.3g} arrive")
    return lines


def _late(what: str, seconds: float, objective: float) -> str:
    if math.isinf(seconds):
        return f"{what}: no end of waiting against an objective of {format_seconds(objective)}"
    return f"{what}: {format_seconds(seconds)} against an objective of {format_seconds(objective)}"


def remedies(question: ServingQuestion) -> list[str]:
    """Single changes with which a plan meets every objective."""
    found = []
    for words, changed in _changes(question):
        result = search_serving(changed, top=1)
        if result.plans:
            found.append(f"{words}: {result.plans[0].prediction.plan.short()}")
    return found


def _changes(question: ServingQuestion) -> Iterator[tuple[str, ServingQuestion]]:
    peaks = question.cluster.device.peak_flops
    if "weights" not in question.fixed and "fp8" in peaks:
        yield (
            "fp8 weights and cache",
            replace(question, fixed={**question.fixed, "weights": "fp8", "cache": "fp8"}),
        )
    for times in GROWTH:
        grown = replace(question, cluster=_grown(question.cluster, times))
        if search_serving(grown, top=1).plans:
            yield f"{times} times as many nodes", grown
            return


def _grown(cluster: Cluster, times: int) -> Cluster:
    groups = tuple(replace(group, nodes=group.nodes * times) for group in cluster.groups)
    return replace(cluster, name=f"{times} x {cluster.name}", groups=groups)
