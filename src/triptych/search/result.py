"""The answer of a search, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.cost.prediction import Prediction
from triptych.plan.plan import Plan
from triptych.search.closest import Closest
from triptych.search.decisions import Decision
from triptych.search.intra.found import Layout
from triptych.search.objective import HOUR_S, Objective
from triptych.units import GIB

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that fits, what it will cost, and why it ranks where it does."""

    plan: Plan
    prediction: Prediction
    reason: str
    behind: Mapping[str, Any] | None = None  # the best plan, by how much and in which term

    def to_json(self) -> dict[str, Any]:
        """The prediction with the reason."""
        return self.prediction.to_json() | {"reason": self.reason, "behind": self.behind}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlan:
    """A plan than which none is both faster and smaller."""

    plan: Plan
    step_time_s: float
    peak_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Its two figures."""
        return {
            "plan": self.plan.short(),
            "step_time_s": self.step_time_s,
            "peak_memory_gib": self.peak_bytes / GIB,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Automatic:
    """What a search for stages of their own adds: the best hand-made plan, and how ours differs.

    `layouts` are those of the best plan's operators; `looked_into` counts sets of shared settings.
    """

    hand_made: Candidate | None  # the best uniform plan; None if none fits
    at_slowest_pace: bool  # it was chosen as if every device were as slow as the slowest
    decisions: tuple[Decision, ...]
    layouts: tuple[Layout, ...]
    looked_into: int

    def to_json(self) -> dict[str, Any]:
        """The comparison and the layouts."""
        hand = self.hand_made
        return {
            "hand_made": hand.prediction.to_json() if hand else None,
            "at_slowest_pace": self.at_slowest_pace,
            "decisions": [decision.to_json() for decision in self.decisions],
            "layouts": [layout.to_json() for layout in self.layouts],
            "looked_into": self.looked_into,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of a search.

    `plans` are the best of each set of degrees, best first; if there are fewer sets than were
    asked for, the next best plans fill up. `runnable` is the best plan that also runs today. If
    nothing fits, `plans` is empty and `closest` says what is missing.

    `candidates` = sets of degrees that no legal plan has (`rejected`, by reason) + `legal` plans;
    `legal` = `simulated` + those passed over, by the name of the `bounds`. Among these, plans too
    large for the memory are in `rejected` as well.
    """

    objective: Objective
    spare: float  # the part of its peak that a plan has to leave free
    plans: tuple[Candidate, ...]
    runnable: Candidate | None
    binding: tuple[str, ...]  # what the best plan would gain from, strongest first
    zero_bytes: Mapping[str, float]  # that a rank of the best plan sends, by ZeRO stage
    front: tuple[FrontPlan, ...]  # if it was asked for
    search_time_s: float
    candidates: int
    legal: int
    simulated: int
    rejected: Mapping[str, int]
    bounds: Mapping[str, int]
    closest: Closest | None
    automatic: Automatic | None = None  # if stages of their own were asked for

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `triptych plan`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "objective": self.objective.name,
            "spare": self.spare,
            "plans": [self._with_objective(candidate) for candidate in self.plans],
            "runnable": self._with_objective(self.runnable) if self.runnable else None,
            "binding": list(self.binding),
            "zero_bytes": dict(self.zero_bytes),
            "front": [plan.to_json() for plan in self.front],
            "search_time_s": self.search_time_s,
            "candidates": self.candidates,
            "legal": self.legal,
            "simulated": self.simulated,
            "rejected": dict(self.rejected),
            "bounds": dict(self.bounds),
            "closest": self.closest.to_json() if self.closest else None,
            "automatic": self.automatic.to_json() if self.automatic else None,
        }

    def _with_objective(self, candidate: Candidate) -> dict[str, Any]:
        """A candidate with the device hours of a billion tokens, and their price if known."""
        per_second = candidate.prediction.tokens_per_s_per_gpu
        hours = 1e9 / per_second / HOUR_S
        document = candidate.to_json() | {"gpu_hours_per_billion_tokens": hours}
        if self.objective.price is not None:
            document["cost_per_billion_tokens"] = hours * self.objective.price
        return document
