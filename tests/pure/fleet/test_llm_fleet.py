"""LLMs that share groups: the line of stages, memory, and one model alone as its own replica."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from triptych.cluster.text import parse_cluster
from triptych.cost.serving.engine import TRIPTYCH
from triptych.cost.serving.layout import layout
from triptych.cost.serving.step import Load, Stepper
from triptych.fleet.llm import CACHE_SHARE, LlmFleet, LlmGroup
from triptych.fleet.models import Shape
from triptych.fleet.shared import policy_of
from triptych.fleet.terms import Terms
from triptych.model.load import load_model
from triptych.plan.serving import ServingPlan
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import LatencyClass
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.line import Line
from triptych.simulate.metrics import meets
from triptych.simulate.priced import GRID, PricedSteps
from triptych.simulate.replica import Replica, StepShape
from triptych.simulate.run import simulate
from triptych.simulate.single_shot import Group
from triptych.simulate.single_shot import simulate as single_shot
from triptych.simulate.trace import Trace, fixed_lengths, make

LLAMA, CLUSTER = load_model("Llama-2-13B"), parse_cluster("1x4xH100-SXM")
TERMS = Terms(ttft_s=0.3, tpot_s=0.03)


def fleet(num_models: int) -> LlmFleet:
    return LlmFleet([LLAMA] * num_models, [TERMS] * num_models, CLUSTER)


def trace_of(rate: float, num_models: int, output: int = 20, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_s = draw([Window(5.0, rate, 3.0)], rng)
    model = rng.integers(0, num_models, len(arrival_s))
    return make(arrival_s, fixed_lengths(400, output), rng, model, tuple("abcd"[:num_models]))


def test_replicas_on_one_line_are_a_single_shot_group() -> None:
    """One-token answers, one prompt a step: whoever's turn it is, as much is done at any time."""
    stages_s = (0.02, 0.03)
    trace = trace_of(20.0, 2, output=1)
    limits = Limits(
        num_blocks=4000,
        model_context=4096,
        max_running=64,
        token_budget=400,
        stages=2,
        prefix_reuse=False,
    )
    line = Line(2, (0.5, 0.5))
    replicas = [Replica(limits, lambda _: stages_s, line=line) for _ in range(2)]
    model_of = trace.model.tolist()
    records = simulate(trace, replicas, lambda request, _: model_of[request.id])
    alone = single_shot(trace.arrival_s, trace.model, [Group(dict.fromkeys(range(2), stages_s))])
    assert sorted(r.finish_s for r in records) == pytest.approx(sorted(alone.finish_s.tolist()))
    assert sum(replica.busy_s for replica in replicas) == pytest.approx(0.02 * len(trace))


def test_a_model_alone_on_its_group_is_a_replica() -> None:
    one, trace = fleet(1), trace_of(30.0, 1)
    groups = [LlmGroup(Shape(2), (0,))]
    (seat,) = one.shared(groups[0]).seats
    replica = Replica(seat.limits, seat.cost, policy_of("0", TERMS))
    records = simulate(trace, [replica], class_of=lambda index: "0")
    latency = LatencyClass(name="0", ttft_s=TERMS.ttft_s, tpot_s=TERMS.tpot_s)
    expected = [meets(record, latency) for record in records]
    assert one.served(groups, trace, refuses_late=False).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_requests_for_a_model_that_no_group_holds_are_missed() -> None:
    trace = trace_of(5.0, 2)
    hits = fleet(2).served([LlmGroup(Shape(1), (0,))], trace)
    assert hits[trace.model == 0].all() and not hits[trace.model == 1].any()


@pytest.mark.parametrize("shape", [Shape(1), Shape(2, 2), Shape(4)])
def test_models_are_dealt_while_weights_leave_room_for_keys_and_values(shape: Shape) -> None:
    own = fleet(8)
    groups = own.dealt(shape, [8.0, 1, 1, 1, 1, 1, 1, 1])
    held = [model for group in groups for model in group.models]
    assert set(held) == set(range(8))
    assert held.count(0) == max(map(held.count, range(8)))
    size_bytes = 2 * 13.0e9 / shape.devices
    for group in groups:
        assert len(set(group.models)) == len(group.models)
        room = (1 - CACHE_SHARE) * CLUSTER.device.memory_bytes
        assert len(group.models) * size_bytes <= room
    shared, alone = (
        own.shared(replace(groups[0], models=models)).seats[0].limits.num_blocks
        for models in (groups[0].models, (0,))
    )
    assert shared < alone


def test_prices_are_those_of_the_cost_model_within_the_grid() -> None:
    plan = ServingPlan(layers=(20, 20), tensor=2, replicas=1, batch=64, chunk=2048)
    stepper = Stepper(layout(LLAMA, plan), CLUSTER, plan, TRIPTYCH)
    priced = PricedSteps(stepper)
    for decodes, context, tokens in ((1, 100, 0), (37, 20_011, 0), (60, 70_001, 1777), (0, 0, 93)):
        shape = StepShape(decodes, context, ((tokens, 0),) if tokens else (), decodes + 1)
        exact = stepper.stages_s(
            Load(decodes, context, tokens, shape.prefill_pairs, shape.num_samples)
        )
        assert priced(shape) == pytest.approx(exact, rel=GRID)
        assert priced(shape) is priced(shape)
