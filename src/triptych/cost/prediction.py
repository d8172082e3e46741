"""What a plan is predicted to cost, in the fields and units of `triptych predict --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from triptych.plan.plan import Plan
from triptych.schedule.timeline import Timeline

SCHEMA_VERSION = 1

TIME_TERMS = (
    "compute",
    "tensor_comm",
    "pipeline_comm",
    "data_comm",
    "context_comm",
    "expert_comm",
    "bubble",
    "optimizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One training step of a plan.

    `time_s` are the terms of the busiest pipeline rank; they add up to `step_time_s`, and its
    communication terms are exposed seconds only. `memory_gib` are the terms of the largest rank.
    `bubble_fraction` is the idle share of all pipeline ranks between first and last compute.
    `bytes_sent_per_rank` is the largest over ranks, axis by axis. `timeline` is absent for
    programs too long to simulate whole, and for plans that a search ranks behind its best.
    """

    step_time_s: float
    step_time_low_s: float  # 80 % of runs lie between this
    step_time_high_s: float  # and this
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    hfu: float
    peak_memory_gib: float
    memory_gib: Mapping[str, float]
    overhead_gib: Mapping[str, float]  # allocator, context: parts of the term `overhead`
    time_s: Mapping[str, float]
    bubble_fraction: float
    bytes_sent_per_rank: Mapping[str, float]
    fits: bool
    memory_spare: float  # what the device has beyond the peak, as a part of the peak
    peak_memory_high_gib: float  # nine of ten runs stay below this
    memory_limit_gib: float
    runnable: bool
    reasons: tuple[str, ...]  # why it is priced, not runnable
    assumptions: Mapping[str, tuple[str, ...]]  # by term
    plan: Plan
    timeline: Timeline | None

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `triptych predict`, without the timeline."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step_time_s": self.step_time_s,
            "step_time_low_s": self.step_time_low_s,
            "step_time_high_s": self.step_time_high_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "peak_memory_gib": self.peak_memory_gib,
            "memory_gib": dict(self.memory_gib),
            "overhead_gib": dict(self.overhead_gib),
            "time_s": dict(self.time_s),
            "bubble_fraction": self.bubble_fraction,
            "bytes_sent_per_rank": dict(self.bytes_sent_per_rank),
            "fits": self.fits,
            "memory_spare": self.memory_spare,
            "peak_memory_high_gib": self.peak_memory_high_gib,
            "memory_limit_gib": self.memory_limit_gib,
            "runnable": self.runnable,
            "reasons": list(self.reasons),
            "assumptions": {term: list(texts) for term, texts in self.assumptions.items()},
            "plan": plan_json(self.plan),
        }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The resolved plan: its short form, its degrees, and every field with its value."""
    degrees = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "ep": plan.ep}
    layers = [stage.num_layers for stage in plan.stages]
    return {"short": plan.short(), **degrees, "layers": layers, **asdict(plan)}
