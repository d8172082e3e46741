"""The search finds what trying every plan with the public `verify` and `predict` finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest
from search_samples import cpus, gpus, tiny, work

from triptych.cluster.cluster import Cluster
from triptych.cost.predict import predict
from triptych.cost.prediction import Prediction
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.model.model import Experts, Model
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, verify
from triptych.plan.short import default_precision, precision
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS
from triptych.search.rank import rounded
from triptych.search.search import search
from triptych.search.splits import layer_splits


def every_plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    schedules: Sequence[str] = ("1f1b", "gpipe"),
    chunks: int = 1,
) -> Iterator[Plan]:
    """All legal plans of the grid that a search walks, by the rules alone."""
    devices, in_node = cluster.num_devices, cluster.devices_per_node
    pricer = Pricer(model, cluster, workload)
    used = precision(default_precision(cluster))
    experts = divisors(model.experts.count) if model.experts else [1]
    for tp, pp, ep in product(divisors(in_node), divisors(devices), experts):
        dp, rest = divmod(devices, tp * pp)
        if rest or pp * chunks > model.num_layers or workload.global_batch % dp:
            continue
        sizes = divisors(workload.global_batch // dp)
        first = Setting(tp, 1, ep, False, sizes[0], "none", "sdpa", False, used.parameter)
        splits = layer_splits(pricer, first, pp * chunks, workload.global_batch // (dp * sizes[0]))
        for counts, microbatch, sp, recompute, zero, schedule in product(
            splits, sizes, (False, True), ("none", "full"), range(4), schedules
        ):
            again = pp == 1 and schedule != schedules[0]  # one stage has nothing to schedule
            if (sp and tp == 1) or (zero and dp == 1) or again:
                continue
            plan = Plan.uniform(
                model.num_layers,
                tp=tp,
                pp=pp,
                dp=dp,
                ep=ep,
                layers=counts,
                chunks=chunks,
                microbatch=microbatch,
                sequence_parallel=sp,
                recompute=recompute,
                zero=zero,
                schedule=schedule,
                precision=used,
            )
            if not verify(plan, model, cluster, workload):
                yield plan


def families(predictions: list[Prediction]) -> list[float]:
    """The best step time of each set of degrees, fastest first."""
    best: dict[tuple[int, ...], float] = {}
    for prediction in predictions:
        plan = prediction.plan
        key = (plan.tp, plan.pp, plan.dp, plan.ep)
        best[key] = min(best.get(key, float("inf")), rounded(prediction.step_time_s))
    return sorted(best.values())


CASES: Mapping[str, tuple[Model, Cluster, Workload]] = {
    "four cores": (tiny(), cpus(4), work(8)),
    "six cores, uneven heads": (tiny(layers=5, kv_heads=3, heads=6), cpus(6), work(6)),
    "two nodes": (tiny(layers=7), gpus(2, 2), work(8)),
    "short of memory": (tiny(vocab=50_000), gpus(1, 4, memory_bytes=1.95e9), work(8, 2048)),
    "heavy head, tied": (tiny(layers=3, vocab=60_000, tied=True), gpus(1, 4), work(4)),
    "experts": (tiny(experts=Experts(count=4, top_k=2, width=96)), gpus(1, 4), work(8)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_search_is_as_good_as_trying_everything(
    case: tuple[Model, Cluster, Workload],
) -> None:
    model, cluster, workload = case
    plans = list(every_plan(model, cluster, workload))
    if cluster.device.kind == "cpu":
        plans = [plan for plan in plans if not unrunnable(plan, model)]
    predictions = [predict(model, cluster, workload, plan) for plan in plans]
    fitting = [prediction for prediction in predictions if prediction.fits]
    expected = families(fitting)
    result = search(model, cluster, workload, top=len(expected))
    assert [rounded(c.prediction.step_time_s) for c in result.plans] == expected
    assert result.fitting == len(fitting)
    assert result.rejected.get("memory", 0) == len(predictions) - len(fitting)


@pytest.mark.parametrize("schedule", sorted(TRAITS.keys() - {"1f1b", "gpipe"}))
def test_a_search_with_a_fixed_schedule_is_as_good_as_trying_everything(schedule: str) -> None:
    model, cluster, workload = tiny(layers=7), gpus(2, 2, memory_bytes=1.7e9), work(8, 2048)
    plans = every_plan(model, cluster, workload, [schedule], TRAITS[schedule].least_chunks)
    predictions = [predict(model, cluster, workload, plan) for plan in plans]
    fitting = [prediction for prediction in predictions if prediction.fits]
    expected = families(fitting)
    result = search(model, cluster, workload, fixed={"schedule": schedule}, top=len(expected))
    assert [rounded(c.prediction.step_time_s) for c in result.plans] == expected
    assert 0 < result.fitting == len(fitting)
    assert result.rejected.get("memory", 0) == len(predictions) - len(fitting)


def test_the_memory_case_does_reject_some_and_keep_some() -> None:
    result = search(*CASES["short of memory"])
    assert 0 < result.rejected["memory"] < result.candidates


def test_an_answer_predicts_what_predict_does() -> None:
    model, cluster, workload = CASES["two nodes"]
    for candidate in search(model, cluster, workload).plans:
        alone = predict(model, cluster, workload, candidate.plan)
        assert candidate.prediction.to_json() == alone.to_json()
