"""The answer of the planner with stages of their own, beside the best hand-made plan."""

from __future__ import annotations

import time
from dataclasses import replace

from triptych.cost.predict import predict_with
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.errors import PlanError, Problem
from triptych.search.auto import Stager
from triptych.search.decisions import decisions
from triptych.search.intra.layouts import layouts
from triptych.search.reason import binding, zero_bytes
from triptych.search.result import Automatic, Candidate, SearchResult
from triptych.search.search import Question, answer, candidate_of, uncollected

UNIFORM = 50
"""Uniform plans of a mixed cluster that are priced with their stages on their own devices: they
are ranked as if every device were as slow as the slowest, and the first need not be the fastest."""


def answer_automatic(question: Question, *, top: int = 5, with_front: bool = False) -> SearchResult:
    """The best plans of both kinds: uniform ones, and the best whose stages are their own.

    Raises PlanError for settings that leave stages nothing to find, and as `answer` does.
    """
    started_s = time.perf_counter()
    with uncollected():
        pricer = Pricer(question.model, question.cluster, question.workload)
        stager = Stager(space=question.space(), pricer=pricer)
        stager.check()
        if question.objective.is_memory:
            rule = "stages of their own are found by time"
            raise PlanError(Problem("objective memory", rule, "objective time"))
        is_mixed = len({group.device.name for group in question.cluster.groups}) > 1
        known = max(top, UNIFORM) if is_mixed else top
        result = answer(question, top=known, with_front=with_front)
        hand = min(result.plans, key=lambda c: c.prediction.step_time_s, default=None)
        if hand:
            stager.best_s = hand.prediction.step_time_s
        found = stager.run()
        plans = (predict_with(pricer, found.plan, with_timeline=False),) if found else ()
        candidates = _ranked(question, [*plans, *(c.prediction for c in result.plans)])[:top]
        if not candidates:
            return result
        best = candidates[0].prediction
        compared = decisions(pricer, best.plan, hand.plan, question.spare) if hand and plans else ()
        return replace(
            result,
            plans=candidates,
            runnable=next((c for c in candidates if c.prediction.runnable), result.runnable),
            binding=binding(best, pricer),
            zero_bytes=zero_bytes(best, pricer),
            closest=None,
            search_time_s=time.perf_counter() - started_s,
            automatic=Automatic(
                hand_made=hand,
                at_slowest_pace=is_mixed,
                decisions=compared,
                layouts=layouts(pricer, best.plan),
                looked_into=stager.looked_into,
            ),
        )


def _ranked(question: Question, predictions: list[Prediction]) -> tuple[Candidate, ...]:
    """Candidates, best first, each with what it lacks."""
    order = sorted(predictions, key=lambda prediction: prediction.step_time_s)
    return tuple(candidate_of(question, prediction, order[0]) for prediction in order)
