"""What a page shows of a search: memory of each pipeline rank, traffic, what binds, what else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from triptych.report.compare import worded
from triptych.report.explain import front_rows, sensitivity_rows, zero_text
from triptych.report.text import gib, seconds
from triptych.units import format_bytes

MOST_RANKS = 16
"""Pipeline ranks whose memory is drawn; of more, every so many."""

_COMMUNICATION = {
    "tensor": "tensor_comm",
    "pipeline": "pipeline_comm",
    "data": "data_comm",
    "context": "context_comm",
    "expert": "expert_comm",
}


class Segment(NamedTuple):
    """A part of a stacked bar."""

    name: str
    value: str
    percent: float  # of the memory of a device, or of the largest rank if that is more


class Stack(NamedTuple):
    """The memory of a pipeline rank."""

    name: str
    total: str
    segments: list[Segment]


def memory_stacks(prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Stacked bars of the pipeline ranks, and where the limit of a device is."""
    ranks: Sequence[Mapping[str, float]] = prediction.get("memory_by_rank_gib") or ()
    limit = prediction.get("memory_limit_gib") or 0.0
    whole = max([limit, *(sum(terms.values()) for terms in ranks)], default=0.0) or 1.0
    stride = max(1, -(-len(ranks) // MOST_RANKS))
    stacks = []
    for index in sorted({*range(0, len(ranks), stride), *([len(ranks) - 1] if ranks else [])}):
        terms = ranks[index]
        segments = [
            Segment(worded(term), gib(size), 100 * size / whole) for term, size in terms.items()
        ]
        stacks.append(Stack(f"rank {index}", gib(sum(terms.values())), segments))
    names = [worded(term) for term in ranks[0]] if ranks else []
    return {"rows": stacks, "names": names, "limit": gib(limit), "percent": 100 * limit / whole}


def traffic(prediction: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Axis, bytes that a rank sends in a step, seconds that computing does not hide."""
    sent = prediction.get("bytes_sent_per_rank") or {}
    times = prediction.get("time_s") or {}
    return [
        (axis, format_bytes(size), seconds(times.get(_COMMUNICATION.get(axis, ""))))
        for axis, size in sent.items()
        if size
    ]


def explained(search: Mapping[str, Any] | None) -> dict[str, Any]:
    """What binds, the Pareto front and the sensitivity of a search."""
    document = search or {}
    return {
        "binding": list(document.get("binding") or ()),
        "zero": zero_text(document),
        "front": list(front_rows(document)),
        "sensitivity": list(sensitivity_rows(document)),
    }


def searched(search: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How many plans there were, and what became of them."""
    if search is None:
        return None
    rejected = {k: n for k, n in (search.get("rejected") or {}).items() if k != "memory"}
    counts = {**(search.get("bounds") or {}), **rejected}
    return {
        "legal": search.get("legal", 0),
        "simulated": search.get("simulated", 0),
        "time": seconds(search.get("search_time_s")),
        "counts": sorted(((k, n) for k, n in counts.items() if n), key=lambda item: -item[1]),
    }
