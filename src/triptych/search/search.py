"""The planner: the best plans for a model on a cluster, and why.

Every legal plan is counted: simulated with its very program, or passed over by a bound that no
plan behind it undercuts (`best_first`). The same question gives the same answer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict_with
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.cost.uncertainty import MEMORY_SPARE
from triptych.errors import PlanError, Problem
from triptych.model.model import Model
from triptych.plan.plan import Plan
from triptych.plan.rules import require_legal, unrunnable, verify
from triptych.plan.workload import Workload
from triptych.search.best_first import BestFirst
from triptych.search.closest import closest
from triptych.search.objective import Objective
from triptych.search.options import Option
from triptych.search.pins import Pins
from triptych.search.reason import binding, difference, reason, zero_bytes
from triptych.search.result import Candidate, FrontPlan, SearchResult
from triptych.search.space import Space

FRONT_SLOWER = 1.25
"""Up to how many times the best step time a plan of the Pareto front takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a search."""

    model: Model
    cluster: Cluster
    workload: Workload
    pins: Pins
    objective: Objective = field(default_factory=Objective)
    spare: float = MEMORY_SPARE  # the part of its peak that a plan has to leave free

    def space(self) -> Space:
        """The plans to look at: on CPUs those that run today, on other devices all, marked."""
        return Space(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            pins=self.pins,
            base=self.pins.base_plan(self.model, self.cluster),
            runnable_only=self.cluster.device.kind == "cpu",
            across_nodes="tp" in self.pins.values,
            spare=self.spare,
        )


def search(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    fixed: Mapping[str, str] | None = None,
    top: int = 5,
    objective: Objective | None = None,
    with_front: bool = False,
    spare: float = MEMORY_SPARE,
) -> SearchResult:
    """The best plans that fit, keeping the `fixed` settings; `with_front` also the Pareto front.

    A plan fits if its peak leaves `spare` of itself free: by default the error bar of the peak.

    Raises PlanError for unknown or unreadable settings, and if the fixed ones contradict each
    other, the model, the cluster or the batch: with every broken rule and values that work.
    """
    question = Question(
        model=model,
        cluster=cluster,
        workload=workload,
        pins=Pins.read(fixed or {}),
        objective=objective or Objective(),
        spare=spare,
    )
    return answer(question, top=top, with_front=with_front)


def answer(
    question: Question, *, top: int = 5, with_front: bool = False, with_closest: bool = True
) -> SearchResult:
    """The answer to a question, as `search` gives it; what would fit only if it is asked for."""
    with uncollected():
        return _answer(question, top, with_front, with_closest)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: a search makes many small values, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _answer(question: Question, top: int, with_front: bool, with_closest: bool) -> SearchResult:
    started_s = time.perf_counter()
    pricer = Pricer(question.model, question.cluster, question.workload)
    space, found, leaders = _leaders(question, pricer, top)
    ledger = found.close()
    if ledger.plans == 0:
        raise PlanError(_nothing_legal(space))
    candidates = _candidates(question, pricer, leaders)
    runnable = _runnable(question, space, pricer, candidates)
    took_s = time.perf_counter() - started_s
    front = _front(found, leaders) if with_front and not question.objective.is_memory else ()
    rejected = dict(sorted(space.rejected.items()))
    if ledger.too_large:
        rejected["memory"] = ledger.too_large
    return SearchResult(
        objective=question.objective,
        spare=question.spare,
        plans=candidates,
        runnable=runnable,
        binding=binding(candidates[0].prediction, pricer) if candidates else (),
        zero_bytes=zero_bytes(candidates[0].prediction, pricer) if candidates else {},
        front=front,
        search_time_s=took_s,
        candidates=sum(space.rejected.values()) + ledger.plans,
        legal=ledger.plans,
        simulated=ledger.simulated,
        rejected=rejected,
        bounds=dict(sorted(ledger.bounds.items())),
        closest=closest(space, pricer) if with_closest and not candidates else None,
    )


def _leaders(question: Question, pricer: Pricer, top: int) -> tuple[Space, BestFirst, list[Option]]:
    """The best plans; tensor parallelism leaves the node only if nothing fits within."""
    space = question.space()
    found = BestFirst(space, pricer, question.objective, runs=_runs(question.model))
    leaders = found.leaders(top)
    if leaders or space.across_nodes:
        return space, found, leaders
    wider = replace(space, across_nodes=True)
    found = BestFirst(wider, pricer, question.objective, runs=_runs(question.model))
    return wider, found, found.leaders(top)


def _candidates(question: Question, pricer: Pricer, leaders: list[Option]) -> tuple[Candidate, ...]:
    predictions = [_predict(pricer, option.plan) for option in leaders]
    return tuple(candidate_of(question, prediction, predictions[0]) for prediction in predictions)


def candidate_of(question: Question, prediction: Prediction, best: Prediction) -> Candidate:
    """A prediction with its reason and what it lacks against the best."""
    term, more_s = difference(prediction, best)
    behind = {
        "step_time_s": prediction.step_time_s - best.step_time_s,
        "share": prediction.step_time_s / best.step_time_s - 1,
        "term": term,
        "term_s": more_s,
        "peak_memory_gib": prediction.peak_memory_gib - best.peak_memory_gib,
    }
    return Candidate(
        plan=prediction.plan,
        prediction=prediction,
        reason=reason(prediction, best, by_memory=question.objective.is_memory),
        behind=None if prediction is best else behind,
    )


def _predict(pricer: Pricer, plan: Plan) -> Prediction:
    """The prediction of a plan that the rules have passed: theirs is the last word."""
    require_legal(plan, pricer.model, pricer.cluster, pricer.workload)
    return predict_with(pricer, plan, with_timeline=False)


def _runnable(
    question: Question, space: Space, pricer: Pricer, candidates: tuple[Candidate, ...]
) -> Candidate | None:
    """The best plan that also runs today."""
    ranked = next((c for c in candidates if c.prediction.runnable), None)
    if not candidates or ranked is candidates[0] or unrunnable(space.base, space.model):
        return ranked
    narrower = replace(space, runnable_only=True)
    found = BestFirst(narrower, pricer, question.objective, runs=lambda option: True)
    best = found.leaders(1)
    if not best:
        return None
    return candidate_of(question, _predict(pricer, best[0].plan), candidates[0].prediction)


def _front(found: BestFirst, leaders: list[Option]) -> tuple[FrontPlan, ...]:
    return tuple(
        FrontPlan(plan=option.plan, step_time_s=option.step_s, peak_bytes=option.peak_bytes)
        for option in found.front(leaders, FRONT_SLOWER)
    )


def _runs(model: Model) -> Callable[[Option], bool]:
    """Whether a plan runs today, asked once for each combination that matters to the answer."""
    known: dict[tuple[object, ...], bool] = {}

    def runs(option: Option) -> bool:
        degrees, base = option.degrees, option.base
        key = (option.schedule, base.recompute, base.offload, degrees.cp > 1, degrees.ep > 1)
        if key not in known:
            known[key] = not unrunnable(option.plan, model)
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
