"""The planner for serving: degrees, replicas, batch and chunk under latency objectives.

Every legal combination of a short list is priced; with a handful of degrees and powers of two for
batch and chunk that is less than a second. Plans that meet all objectives come first. Of these,
with a rate of arrivals the one that answers a request soonest is best, without one the one with
most tokens a second.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.balance import balanced_layers
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.layout import layout
from triptych.cost.serving.predict import ServingPrediction, ServingPricer
from triptych.cost.serving.step import Load
from triptych.errors import PlanError
from triptych.model.model import Model
from triptych.plan.nearby import divisors
from triptych.plan.rules import usable_tensor_degrees
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.plan.serving_short import broken_rules, layers_of
from triptych.plan.short import default_precision
from triptych.search.serving_reason import binding, compared, objective, shortfall

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)

MOST_STAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """What is to be served where, and what every plan keeps."""

    model: Model
    cluster: Cluster
    workload: ServingWorkload
    engine: Engine = TRIPTYCH
    fixed: Mapping[str, str] = field(default_factory=dict)

    def pinned(self, key: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        """The pinned value, or all values that are looked at."""
        return (int(self.fixed[key]),) if key in self.fixed else otherwise


class Ranked(NamedTuple):
    """A plan with its price and the reason for its place."""

    prediction: ServingPrediction
    reason: str

    def to_json(self) -> dict[str, Any]:
        """An entry of `plans`."""
        return {**self.prediction.to_json(), "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """Plans that meet the objectives, best first; without any, the one that misses them least."""

    plans: tuple[Ranked, ...]
    nearest: ServingPrediction | None
    binds: tuple[str, ...]  # what limits the best plan
    rejected: Mapping[str, int]
    candidates: int
    search_time_s: float

    def to_json(self) -> dict[str, Any]:
        """The JSON document of `triptych plan --task serve`."""
        return {
            "plans": [plan.to_json() for plan in self.plans],
            "nearest": self.nearest and self.nearest.to_json(),
            "binds": list(self.binds),
            "rejected": dict(self.rejected),
            "candidates": self.candidates,
            "search_time_s": self.search_time_s,
        }


def search_serving(question: ServingQuestion, top: int = 5) -> ServingResult:
    """All plans of the space, priced and ranked; of each layout the best batch and chunk.

    Raises PlanError if no plan can keep the pins.
    """
    start = time.perf_counter()
    _check_pins(question)
    rejected: Counter[str] = Counter()
    good: dict[tuple[object, ...], ServingPrediction] = {}
    nearest: ServingPrediction | None = None
    candidates = 0
    for prediction in _priced(question, rejected):
        candidates += 1
        reason = shortfall(prediction)
        if reason:
            rejected[reason] += 1
            if nearest is None or miss(prediction, question) < miss(nearest, question):
                nearest = prediction
            continue
        plan = prediction.plan
        key = (plan.tensor, plan.layers, plan.replicas)
        if key not in good or _order(prediction, question) < _order(good[key], question):
            good[key] = prediction
    ranked = sorted(good.values(), key=lambda one: _order(one, question))[:top]
    best = ranked[0] if ranked else None
    return ServingResult(
        plans=tuple(Ranked(one, compared(one, best, question.workload)) for one in ranked if best),
        nearest=None if best else nearest,
        binds=_binds(best, question) if best else (),
        rejected=dict(rejected.most_common()),
        candidates=candidates,
        search_time_s=time.perf_counter() - start,
    )


def _binds(best: ServingPrediction, question: ServingQuestion) -> tuple[str, ...]:
    """What limits the best plan; an objective, where twice the batch would miss it."""
    lines = binding(best, question.cluster, question.workload)
    if question.workload.rate is not None or best.batch < best.plan.batch:
        return lines
    plan = replace(best.plan, batch=2 * best.plan.batch)
    pricer = ServingPricer(question.model, question.cluster, plan, question.engine)
    larger = pricer.predict(question.workload)
    return (*lines, *objective(larger, question.workload))


def _order(prediction: ServingPrediction, question: ServingQuestion) -> tuple[float, ...]:
    """Smaller is better: seconds of a whole answer, or tokens; then fewer ranks to talk to."""
    plan, workload = prediction.plan, question.workload
    if workload.rate is not None or workload.concurrency is not None:
        whole_s = prediction.ttft_s + (workload.output_tokens - 1.0) * prediction.tpot_s
        first = float(f"{whole_s:.3g}")
    else:
        first = -float(f"{prediction.output_tokens_per_s:.3g}")
    return (first, plan.tensor * plan.pp, plan.pp, -plan.batch, plan.chunk)


def miss(prediction: ServingPrediction, question: ServingQuestion) -> float:
    """How far a plan is from the objectives: the largest ratio to one; memory weighs most."""
    if not prediction.fits:
        return 1e6 + prediction.over_bytes / 1e3
    workload = question.workload
    ratios = [1.0]
    if workload.ttft_s:
        ratios.append(prediction.ttft_s / workload.ttft_s)
    if workload.tpot_s:
        ratios.append(prediction.tpot_s / workload.tpot_s)
    if workload.rate:
        ratios.append(workload.rate / max(prediction.max_requests_per_s, 1e-12))
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    return max(finite) + (0.0 if len(finite) == len(ratios) else max(finite))


def _check_pins(question: ServingQuestion) -> None:
    """Degrees that are pinned have to be legal by themselves, with one replica."""
    fixed = question.fixed
    alone = replace(
        _plain(question, int(fixed.get("tp", 1)), int(fixed.get("pp", 1))),
        replicas=int(fixed.get("replicas", 1)),
    )
    problems = broken_rules(alone, question.model, question.cluster)
    if problems:
        raise PlanError(problems)


# --- space ---------------------------------------------------------------------------------------


def _priced(question: ServingQuestion, rejected: Counter[str]) -> Iterator[ServingPrediction]:
    """Every plan of the space, priced; those that are not legal are counted by rule."""
    for plan_of_layout in _layouts(question, rejected):
        known = layout(question.model, plan_of_layout)
        for chunk in question.pinned("chunk", CHUNKS):
            plan = replace(plan_of_layout, chunk=chunk)
            for batch in question.pinned("batch", BATCHES):
                pricer = ServingPricer(
                    question.model,
                    question.cluster,
                    replace(plan, batch=batch),
                    question.engine,
                    known,
                )
                prediction = pricer.predict(question.workload)
                yield prediction
                if not prediction.fits or HEADROOM * prediction.batch < batch:
                    break  # a larger batch is the same: there is no room, or there are no requests


def _layouts(question: ServingQuestion, rejected: Counter[str]) -> Iterator[ServingPlan]:
    """Layouts that fill the cluster; the stages of a pipeline are balanced with the head."""
    model, cluster = question.model, question.cluster
    devices = cluster.num_devices
    usable = usable_tensor_degrees(model, devices)
    sizes = tuple(divisors(devices))
    most_tensor = devices if "tp" in question.fixed else cluster.devices_per_node
    for tensor in question.pinned("tp", tuple(t for t in sizes if t <= most_tensor)):
        for stages in question.pinned("pp", tuple(p for p in sizes if p <= MOST_STAGES)):
            if tensor not in usable:
                rejected["heads do not divide by tp"] += 1
            elif tensor * stages > devices or stages > model.num_layers:
                rejected["more ranks or stages than there are"] += 1
            else:
                plan = _layout(question, tensor, stages)
                if broken_rules(plan, model, cluster):
                    rejected["not legal"] += 1
                else:
                    yield plan


def _plain(question: ServingQuestion, tensor: int, stages: int) -> ServingPlan:
    """Stages as even as can be, unless pinned; replicas fill the cluster."""
    fixed = question.fixed
    layers = layers_of({**fixed, "pp": str(stages)}, question.model.num_layers)
    left = question.cluster.num_devices // (tensor * len(layers))
    weights = fixed.get("weights", default_precision(question.cluster))
    return ServingPlan(
        layers=layers,
        tensor=tensor,
        replicas=int(fixed.get("replicas", max(1, left))),
        batch=BALANCED_FOR,
        chunk=CHUNKS[-1],
        weights=weights,
        cache=fixed.get("cache", weights),
    )


def _layout(question: ServingQuestion, tensor: int, stages: int) -> ServingPlan:
    """The same with stages balanced."""
    model, plan = question.model, _plain(question, tensor, stages)
    if stages == 1 or "layers" in question.fixed:
        return plan
    length = question.workload.input_tokens + question.workload.output_tokens / 2.0
    load = Load(decodes=BALANCED_FOR, context=BALANCED_FOR * length, samples=BALANCED_FOR)
    layers = balanced_layers(model, question.cluster, plan, question.engine, load)
    return replace(plan, layers=layers)


HEADROOM = 2
"""Times the running sequences that a batch leaves room for where arrivals bunch."""

BALANCED_FOR = 32
"""Sequences of a step for which stages are balanced."""
