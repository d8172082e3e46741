"""The serving simulator against hand counts, the single-shot recursion, and the engine's loop."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request, State
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.step import Step
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.replica import LinearCost, Record, Replica, StepShape
from triptych.simulate.run import simulate
from triptych.simulate.single_shot import Group
from triptych.simulate.single_shot import simulate as single_shot
from triptych.simulate.trace import Trace, fixed_lengths, make, uniform_lengths


def limits_of(**changes: object) -> Limits:
    base = dict(
        num_blocks=4000,
        model_context=4096,
        max_running=64,
        token_budget=512,
        steps_ahead=0,
        prefix_reuse=False,
    )
    return Limits(**{**base, **changes})  # type: ignore[arg-type]


def trace_of(arrival_s: list[float], prompt: int, output: int) -> Trace:
    return make(np.array(arrival_s), fixed_lengths(prompt, output), np.random.default_rng(0))


def test_one_request_takes_the_sum_of_its_steps() -> None:
    cost = LinearCost(fixed_s=0.01, token_s=1e-4, context_s=1e-6, pair_s=1e-9)
    (record,) = simulate(trace_of([2.0], 1000, 4), [Replica(limits_of(), cost)])
    first = 0.02 + 1000e-4 + 1e-9 * 1000 * 1001 / 2
    rest = 3 * (0.01 + 1e-4) + 1e-6 * (1001 + 1002 + 1003)
    assert record.ttft_s == pytest.approx(first, rel=1e-12)
    assert record.finish_s == pytest.approx(2.0 + first + rest, rel=1e-12)
    assert record.tpot_s == pytest.approx(rest / 3, rel=1e-12)
    assert record.state is State.FINISHED and record.num_tokens == 4


def test_shapes_tell_what_a_step_computes() -> None:
    shapes: list[StepShape] = []

    def cost(shape: StepShape) -> tuple[float, ...]:
        shapes.append(shape)
        return (1.0,)

    simulate(trace_of([0.0, 0.5], 600, 3), [Replica(limits_of(), cost)])
    assert shapes[0] == StepShape(0, 0, ((512, 0),), 0)
    assert shapes[1] == StepShape(0, 0, ((88, 512), (424, 0)), 1)
    assert shapes[2] == StepShape(1, 601, ((176, 424),), 2)
    assert shapes[3] == StepShape(2, 602 + 601, (), 2)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("ahead", [0, 1])
def test_prompts_one_a_step_are_the_single_shot_line(stages: int, ahead: int) -> None:
    """One-token answers, one prompt a step: the queue of the closed forms, request by request."""
    limits = limits_of(stages=stages, steps_ahead=ahead)
    arrival_s = draw([Window(3000.0, 0.7)], np.random.default_rng(5))
    trace = make(arrival_s, fixed_lengths(512, 1), np.random.default_rng(0))
    cost = LinearCost(fixed_s=1 / stages, stages=stages)
    records = simulate(trace, [Replica(limits, cost)])
    line = Group({0: (1 / stages,) * stages})
    expected = single_shot(arrival_s, trace.model, [line]).finish_s
    np.testing.assert_allclose([r.finish_s for r in records], expected, rtol=1e-9)


def test_at_equal_times_completed_steps_come_before_requests() -> None:
    """The second request finds the place that the first has just left, and starts at once."""
    limits = limits_of(max_running=1)
    records = simulate(trace_of([0.0, 1.0, 1.0], 8, 1), [Replica(limits, LinearCost(fixed_s=1.0))])
    assert [record.finish_s for record in records] == [1.0, 2.0, 3.0]


def test_a_pipeline_multiplies_throughput_and_leaves_latency() -> None:
    trace = trace_of([0.0] * 64, 8, 200)
    spans, tpots = [], []
    for stages in (1, 4):
        cost = LinearCost(fixed_s=0.04 / stages, stages=stages)
        limits = limits_of(stages=stages, max_running=16 * stages)
        records = simulate(trace, [Replica(limits, cost)])
        spans.append(max(record.finish_s for record in records))
        tpots.append(np.median([record.tpot_s for record in records]))
    assert spans[0] / spans[1] == pytest.approx(4.0, rel=0.05)
    assert tpots[1] == pytest.approx(tpots[0], rel=0.02)


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_token_is_used_before_it_has_left_the_last_stage(ahead: int) -> None:
    """Stages of 1 and 3 s: two requests alternate, and each token still takes at least 4 s."""
    limits = limits_of(stages=2, steps_ahead=ahead)
    records = simulate(trace_of([0.0, 0.0], 512, 20), [Replica(limits, lambda shape: (1.0, 3.0))])
    assert all(record.tpot_s == pytest.approx(6.0, abs=0.2) for record in records)
    (lone,) = simulate(trace_of([0.0], 512, 20), [Replica(limits, lambda shape: (1.0, 3.0))])
    assert lone.tpot_s == pytest.approx(4.0)


@pytest.mark.parametrize(("overlap", "stage_times"), [(False, 16 * 4), (True, 16 + 3)])
def test_a_long_prompt_fills_a_pipeline_if_its_chunks_may_overlap(
    overlap: bool, stage_times: int
) -> None:
    limits = limits_of(stages=4, overlap_chunks=overlap, model_context=10_000)
    cost = LinearCost(fixed_s=0.01, stages=4)
    (record,) = simulate(trace_of([0.0], 16 * 512, 1), [Replica(limits, cost)])
    assert record.ttft_s == pytest.approx(0.01 * stage_times)


def test_planning_ahead_changes_no_duration_of_a_lone_request() -> None:
    cost = LinearCost(fixed_s=0.01)
    for ahead in (0, 1):
        replica = Replica(limits_of(steps_ahead=ahead), cost)
        (record,) = simulate(trace_of([0.0], 100, 50), [replica])
        assert record.finish_s == pytest.approx(0.5)
        assert replica.num_steps == 50


def test_an_answer_that_ends_early_costs_at_most_the_step_that_was_planned_ahead() -> None:
    steps = []
    for ahead in (0, 1):
        replica = Replica(limits_of(steps_ahead=ahead), LinearCost(fixed_s=0.01))
        (record,) = simulate(trace_of([0.0], 100, 50), [replica], max_tokens=200)
        assert record.num_tokens == 50 and record.finish_s == pytest.approx(0.5)
        steps.append(replica.num_steps)
    assert steps == [50, 51]


def test_requests_go_to_the_replica_that_has_least_to_do() -> None:
    replicas = [Replica(limits_of(max_running=1), LinearCost(fixed_s=1.0)) for _ in range(2)]
    records = simulate(trace_of([0.0, 0.1, 0.2, 0.3], 8, 1), replicas)
    assert [record.finish_s for record in records] == pytest.approx([1.0, 1.1, 2.0, 2.1])


def test_what_does_not_fit_is_refused_and_disturbs_nobody() -> None:
    trace = make(np.arange(50.0), uniform_lengths((1, 3000), (1, 2000)), np.random.default_rng(1))
    replica = Replica(limits_of(num_blocks=256), LinearCost(fixed_s=0.01))
    records = simulate(trace, [replica])
    for record in records:
        fits = record.prompt_tokens + record.output_tokens <= 4096
        assert record.state is (State.FINISHED if fits else State.REFUSED)
    assert replica.scheduler.load.num_free_blocks == 256


def test_room_to_grow_spares_preemptions_and_throughput() -> None:
    """A pool that is always full: requests that start too early are preempted and start again."""
    trace = make(np.zeros(300), uniform_lengths((50, 150), (100, 300)), np.random.default_rng(1))
    preemptions, spans = [], []
    for growth_tokens in (0, 32):
        limits = limits_of(num_blocks=400, growth_tokens=growth_tokens)
        replica = Replica(limits, LinearCost(fixed_s=0.01, token_s=1e-4))
        records = simulate(trace, [replica])
        preemptions.append(replica.scheduler.load.num_preemptions)
        spans.append(max(record.finish_s for record in records))
    assert preemptions[1] < preemptions[0] / 4 and spans[1] < spans[0]


def decisions(records: list[Record]) -> list[tuple[float, float]]:
    return [(record.first_token_s, record.finish_s) for record in records]


@pytest.mark.parametrize(("stages", "ahead"), [(1, 1), (2, 0), (3, 1)])
def test_the_engines_loop_with_the_same_durations_takes_the_same_decisions(
    stages: int, ahead: int
) -> None:
    """Two drivers of one scheduler: the simulator, and one that knows nothing of it."""
    limits = limits_of(
        stages=stages,
        steps_ahead=ahead,
        num_blocks=120,
        max_running=12,
        token_budget=100,
        growth_tokens=1,
    )
    rng = np.random.default_rng(stages)
    arrival_s = draw([Window(20.0, 4.0, 3.0)], rng)
    trace = make(arrival_s, uniform_lengths((1, 400), (1, 200)), rng)
    cost = LinearCost(fixed_s=0.01, token_s=1e-4, stages=stages)
    replica = Replica(limits, cost)
    records = simulate(trace, [replica])
    assert replica.scheduler.load.num_preemptions > 0
    times = EngineLoop(limits).run(trace)
    assert np.array(times) == pytest.approx(np.array(decisions(records)), rel=1e-9)


class EngineLoop:
    """Another driver: all events in one heap; equal times by kind, then by number."""

    def __init__(self, limits: Limits) -> None:
        self.core = Scheduler(limits)
        self.free = [0.0] * limits.stages
        self.ends = [0.0] * limits.stages
        self.events: list[tuple[float, int, int]] = []
        self.steps: dict[int, Step] = {}
        self.times: dict[int, list[float]] = {}

    def run(self, trace: Trace) -> list[tuple[float, float]]:
        self.events = [(float(at), 1, index) for index, at in enumerate(trace.arrival_s)]
        while self.events:
            now, kind, number = heapq.heappop(self.events)
            if kind == 0:
                self.complete(self.steps.pop(number), now)
            else:
                prompt, answer = trace.prompt_tokens[number], trace.output_tokens[number]
                request = Request(
                    id=number, prompt=[1] * prompt, max_tokens=int(answer), arrival_s=now
                )
                self.core.admit(request, now)
            while (step := self.core.plan(now)) is not None:
                self.steps[step.id] = step
                heapq.heappush(self.events, (self.end(step, now), 0, step.id))
        return [(self.times[i][0], self.times[i][-1]) for i in range(len(trace))]

    def complete(self, step: Step, now: float) -> None:
        tokens = [1] * len(step.samples)
        for request_id, _ in self.core.complete(step.id, tokens, now).answers:
            self.times.setdefault(request_id, []).append(now)

    def end(self, step: Step, now: float) -> float:
        """When a step that is planned now leaves the last stage."""
        now = max(now, self.ends[-len(self.free)])
        for stage, free in enumerate(self.free):
            now = max(now, free) + 0.01 + 1e-4 * step.num_tokens / len(self.free)
            self.free[stage] = now
        self.ends.append(now)
        return now
