"""The planner: the fastest plans for a model on a cluster, by exhaustive search.

Every legal plan is priced by a closed form; only plans that could still be among the answers are
simulated. The same question gives the same answer: ties are broken by `rank.Contender.order`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict_with
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import require_legal, unrunnable, verify
from triptych.plan.workload import Workload
from triptych.search.closest import Closest, closest
from triptych.search.options import Found, walk
from triptych.search.pins import Pins
from triptych.search.rank import Contender, best, ranked
from triptych.search.reason import reason
from triptych.search.space import Space

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that fits, what it will cost, and why it ranks where it does."""

    plan: Plan
    prediction: Prediction
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The prediction with the reason."""
        return self.prediction.to_json() | {"reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of a search.

    `plans` are the best of each set of degrees, fastest first; if there are fewer sets than were
    asked for, the next best plans fill up. `runnable` is the best plan that also runs today.
    Candidates that were rejected (by reason) and those that fit add up to `candidates`. If
    nothing fits, `plans` is empty and `closest` says what is missing.
    """

    plans: tuple[Candidate, ...]
    runnable: Candidate | None
    search_time_s: float
    candidates: int
    fitting: int
    rejected: Mapping[str, int]
    closest: Closest | None

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `triptych plan`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "plans": [candidate.to_json() for candidate in self.plans],
            "runnable": self.runnable.to_json() if self.runnable else None,
            "search_time_s": self.search_time_s,
            "candidates": self.candidates,
            "fitting": self.fitting,
            "rejected": dict(self.rejected),
            "closest": self.closest.to_json() if self.closest else None,
        }


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    fixed: Mapping[str, str] | None = None,
    top: int = 5,
) -> SearchResult:
    """The fastest plans that fit, keeping the `fixed` settings.

    On CPUs only plans that run today are looked at; on other devices all are, marked.

    Raises PlanError for unknown or unreadable settings, and if the fixed ones contradict each
    other, the model, the cluster or the batch: with every broken rule and values that work.
    """
    started_s = time.perf_counter()
    pins = Pins.read(fixed or {})
    space = _space(model, cluster, workload, pins)
    pricer = Pricer(model, cluster, workload)
    space, found = _walk(space, pricer)
    if found.nearest is None:
        raise PlanError(_nothing_legal(space))
    rejected = dict(sorted(space.rejected.items()))
    if found.too_large:
        rejected["memory"] = found.too_large
    answers, runnable = _answers(space, pricer, found, top)
    return SearchResult(
        plans=answers,
        runnable=runnable,
        search_time_s=time.perf_counter() - started_s,
        candidates=sum(rejected.values()) + len(found.options),
        fitting=len(found.options),
        rejected=rejected,
        closest=None if answers else closest(space, pricer, found.nearest),
    )


def _space(model: Model, cluster: Cluster, workload: Workload, pins: Pins) -> Space:
    base = pins.base_plan(model, cluster)
    is_pinned = "tp" in pins.values
    return Space(
        model=model,
        cluster=cluster,
        workload=workload,
        pins=pins,
        base=base,
        runnable_only=cluster.device.kind == "cpu",
        across_nodes=is_pinned,
    )


def _walk(space: Space, pricer: Pricer) -> tuple[Space, Found]:
    """What a space holds; tensor parallelism leaves the node only if nothing fits within."""
    found = walk(space, pricer)
    if found.options or space.across_nodes:
        return space, found
    wider = replace(space, across_nodes=True)
    return wider, walk(wider, pricer)


def _answers(
    space: Space, pricer: Pricer, found: Found, top: int
) -> tuple[tuple[Candidate, ...], Candidate | None]:
    """The ranked candidates, and the best one that runs."""
    runs = _runs(space.model)
    contenders = [Contender(option, space.base, runs) for option in found.options]
    chosen = ranked(contenders, top)
    if not chosen:
        return (), None
    first = _predict(pricer, chosen[0].plan)
    answers = [Candidate(plan=first.plan, prediction=first, reason=reason(first, first))]
    for contender in chosen[1:]:
        answers.append(_candidate(pricer, contender.plan, first))
    runnable = next((a for a in answers if a.prediction.runnable), None)
    if runnable is not answers[0]:
        leader = best((c for c in contenders if c.runnable), 1)
        runnable = _candidate(pricer, leader[0].plan, first) if leader else None
    return tuple(answers), runnable


def _candidate(pricer: Pricer, plan: Plan, first: Prediction) -> Candidate:
    prediction = _predict(pricer, plan, with_timeline=False)
    return Candidate(plan=plan, prediction=prediction, reason=reason(prediction, first))


def _predict(pricer: Pricer, plan: Plan, *, with_timeline: bool = True) -> Prediction:
    """The prediction of a plan that the rules have passed: theirs is the last word."""
    require_legal(plan, pricer.model, pricer.cluster, pricer.workload)
    return predict_with(pricer, plan, with_timeline=with_timeline)


def _runs(model: Model) -> Callable[[Plan], bool]:
    """Whether a plan runs today, asked once for each combination that matters to the answer."""
    known: dict[tuple[object, ...], bool] = {}

    def runs(plan: Plan) -> bool:
        key = (plan.zero, plan.schedule, plan.recompute, plan.cp > 1, plan.ep > 1)
        if key not in known:
            known[key] = not unrunnable(plan, model)
        return known[key]

    return runs


def _nothing_legal(space: Space) -> list[Problem]:
    """Why no plan is legal: the rules that the fixed settings break, taken as one plan."""
    typical = space.pins.typical_plan(space.model, space.cluster)
    problems = verify(typical, space.model, space.cluster, space.workload)
    if problems:
        return problems
    counts = ", ".join(f"{count} by {reason}" for reason, count in sorted(space.rejected.items()))
    return [
        Problem(
            f"no plan for {space.cluster.num_devices} devices is legal"
            + (f": {counts}" if counts else ""),
            "degrees multiply to the number of devices and divide model, batch and sequence",
            "another number of devices, or another global batch",
        )
    ]
