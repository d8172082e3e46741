"""The planner for serving: objectives as constraints, the best of all plans, and why."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from triptych.cluster.text import parse_cluster
from triptych.cost.serving.predict import predict_serving
from triptych.errors import PlanError
from triptych.model.load import load_model
from triptych.plan.serving import ServingPlan, ServingWorkload
from triptych.plan.serving_short import parse_serving_plan
from triptych.search.serving import BATCHES, CHUNKS, ServingQuestion, search_serving
from triptych.search.serving_remedy import lacks, remedies

QUESTION = ServingQuestion(
    model=load_model("llama-3.1-8b"),
    cluster=parse_cluster("1x4xH100-SXM"),
    workload=ServingWorkload(input_tokens=512, output_tokens=128),
)


def asked(**workload: float) -> ServingQuestion:
    return replace(QUESTION, workload=replace(QUESTION.workload, **workload))


def test_the_best_plan_is_the_best_of_all_combinations() -> None:
    question = replace(asked(tpot_s=0.02), fixed={"pp": "1"})
    best = search_serving(question).plans[0].prediction
    every = []
    for tensor, batch, chunk in itertools.product((1, 2, 4), BATCHES, CHUNKS):
        chosen = ServingPlan(
            layers=(32,), tensor=tensor, replicas=4 // tensor, batch=batch, chunk=chunk
        )
        one = predict_serving(question.model, question.cluster, question.workload, chosen)
        every.append(one)
    good = [one for one in every if one.is_good]
    most = max(one.output_tokens_per_s for one in good)
    assert 0 < len(good) < len(every)
    assert best.output_tokens_per_s == pytest.approx(most, rel=1e-3)


def test_objectives_are_kept_by_every_plan_that_is_shown() -> None:
    result = search_serving(asked(rate=8.0, ttft_s=0.3, tpot_s=0.02))
    assert result.plans
    for ranked in result.plans:
        one = ranked.prediction
        assert one.ttft_s <= 0.3 and one.tpot_s <= 0.02 and one.max_requests_per_s > 8.0
        assert one.plan.world_size == 4
    whole = [p.prediction.ttft_s + 127 * p.prediction.tpot_s for p in result.plans]
    assert whole == sorted(whole)
    assert result.candidates + sum(
        count for why, count in result.rejected.items() if "ranks" in why or "heads" in why
    ) >= sum(result.rejected.values())


def test_a_tighter_objective_never_gives_more_tokens() -> None:
    tokens = [
        search_serving(asked(tpot_s=tpot)).plans[0].prediction.output_tokens_per_s
        for tpot in (0.1, 0.02, 0.01)
    ]
    assert tokens == sorted(tokens, reverse=True)


def test_the_same_question_has_the_same_answer() -> None:
    one, other = search_serving(asked(rate=4.0)), search_serving(asked(rate=4.0))
    assert replace(one, search_time_s=0.0) == replace(other, search_time_s=0.0)


def test_pins_are_kept() -> None:
    fixed = {"tp": "2", "pp": "2", "batch": "16", "weights": "fp8"}
    plans = search_serving(replace(QUESTION, fixed=fixed)).plans
    assert len(plans) == 1
    chosen = plans[0].prediction.plan
    assert (chosen.tensor, chosen.pp, chosen.batch, chosen.weights) == (2, 2, 16, "fp8")


def test_what_limits_the_best_plan_is_said() -> None:
    small = search_serving(replace(asked(rate=1.0), fixed={"tp": "1", "pp": "1"}))
    text = "\n".join(small.binds)
    assert "bound by memory bandwidth" in text and "replicas would keep up" in text
    tight = search_serving(asked(tpot_s=0.01))
    assert any("the objective between tokens limits the batch" in line for line in tight.binds)
    pins = {"chunk": "512", "batch": "1024", "pp": "1"}
    short = search_serving(replace(QUESTION, fixed=pins))
    assert any("512 tokens has room for 102 sequences" in line for line in short.binds)
    long = replace(QUESTION, workload=ServingWorkload(input_tokens=100_000, output_tokens=1000))
    assert any("its size limits the batch" in line for line in search_serving(long).binds)


def test_nothing_that_meets_the_objectives_gives_the_nearest_and_what_works() -> None:
    question = replace(
        QUESTION,
        model=load_model("llama-3.1-70b"),
        cluster=parse_cluster("1x1xH100-SXM"),
    )
    result = search_serving(question)
    assert not result.plans and result.nearest
    (line,) = lacks(result.nearest, question.workload)
    assert f"({math.ceil(result.nearest.over_bytes)} bytes) a device" in line
    changes = remedies(question)
    assert any(change.startswith("fp8 weights") for change in changes)
    assert any("as many nodes" in change for change in changes)


def test_the_nearest_miss_has_the_least_excess() -> None:
    question = asked(tpot_s=1e-4)
    result = search_serving(question)
    assert not result.plans and result.nearest
    (line,) = lacks(result.nearest, question.workload)
    assert "against an objective of 100 us" in line
    assert result.nearest.tpot_s < 6e-3 and math.isfinite(result.nearest.ttft_s)


def test_a_short_form_reads_back() -> None:
    text = "tp=2,pp=2,replicas=1,layers=17+15,batch=64,chunk=1024,weights=fp8,cache=bf16"
    chosen = parse_serving_plan(text, QUESTION.model, QUESTION.cluster, batch=1, chunk=1)
    assert chosen.short() == text and chosen.world_size == 4


def test_every_broken_rule_of_a_plan_is_listed() -> None:
    with pytest.raises(PlanError) as caught:
        parse_serving_plan(
            "tp=3,pp=40,replicas=9", QUESTION.model, QUESTION.cluster, batch=1, chunk=1
        )
    text = str(caught.value)
    assert "9" in text and "pp=40" in text and "devices" in text
    with pytest.raises(PlanError) as caught:
        parse_serving_plan("tpp=3,batch=x,pp", QUESTION.model, QUESTION.cluster, batch=1, chunk=1)
    assert len(caught.value.problems) == 3
