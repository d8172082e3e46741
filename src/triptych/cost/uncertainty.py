"""How far off a predicted step time or peak may be: the half-width of its 80 % bar.

Each part of a step has an uncertainty of its own; parts err independently of each other, so their
squares add up. The numbers are those that make the bars hold on published runs (`triptych
validate`): 80 % of measured step times lie inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

RUN = 0.078
"""Of any run: clocks, noise, what no term describes."""

RUN_ON_CPU = 0.15
"""The same on CPUs, whose rates depend on shapes in ways that a one-second probe does not tell."""

TERMS: Mapping[str, float] = {
    "compute": 0.02,
    "tensor_comm": 0.6,
    "pipeline_comm": 0.5,
    "data_comm": 0.3,
    "context_comm": 0.25,
    "expert_comm": 1.0,
    "bubble": 0.12,
    "optimizer": 0.6,
}
"""Of each term of a step, as a part of that term."""

FP8 = 0.06
EXPERTS = 0.13
"""Scaling recipes of fp8, and the balance of experts, are not known."""

ASSUMED = 0.25
"""Of a run whose recomputation or micro-batch is not stated."""

MEMORY = 0.08
"""Of the peak of a rank: nine of ten measured peaks are below exp(0.08) times the predicted one."""

MEMORY_SPARE = math.exp(MEMORY) - 1
"""The part of its peak that a plan has to leave free to fit with the bar."""

SERVING: Mapping[str, float] = {"ttft": 0.41, "tpot": 0.18, "throughput": 0.22}
"""Of what users of a server see: 80 % of measured runs lie within a factor of exp of these."""


def serving_bar(quantity: str, value: float) -> tuple[float, float]:
    """The ends of the 80 % bar of a predicted quantity of `SERVING`."""
    factor = math.exp(SERVING[quantity])
    return value / factor, value * factor


def half_width(
    time_s: Mapping[str, float], dtype: str, *, has_experts: bool = False, is_cpu: bool = False
) -> float:
    """Half-width of the 80 % bar as a logarithm: times lie within a factor of exp(half-width)."""
    total_s = sum(time_s.values())
    parts = [
        RUN_ON_CPU if is_cpu else RUN,
        *(TERMS[term] * seconds / total_s for term, seconds in time_s.items()),
    ]
    parts += [FP8] if dtype == "fp8" else []
    parts += [EXPERTS] if has_experts else []
    return math.hypot(*parts)
