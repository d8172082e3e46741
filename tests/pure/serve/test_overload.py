"""At twice what a replica gets through, what is admitted keeps its objectives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from triptych.serve.core.forecast import Errors
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.pace import Pace
from triptych.serve.core.request import LatencyClass, Request, State
from triptych.serve.core.scheduler import Scheduler
from triptych.simulate.arrivals import Window, draw_models
from triptych.simulate.replica import LinearCost, Record, Replica, StepShape
from triptych.simulate.run import simulate
from triptych.simulate.trace import make, uniform_lengths

PROMPT, ANSWER, TTFT_S, TPOT_S = 64, 32, 2.0, 0.5
COSTS = {
    "rows": LinearCost(fixed_s=0.03, token_s=0.0022),
    "weights": LinearCost(fixed_s=0.1, token_s=0.0015),
    "two stages": LinearCost(fixed_s=0.015, token_s=0.0022, stages=2),
}


def capacity(cost: LinearCost) -> float:
    """Requests a second that steps of TPOT_S get through."""
    per_token_s = cost.token_s * (1 + PROMPT / ANSWER) / cost.stages
    rows = (TPOT_S / cost.stages - cost.fixed_s) / per_token_s
    return cost.stages * rows / TPOT_S / ANSWER


def served(
    cost: LinearCost, rate: float, count: int = 2000, cv: float = 1.0, drift: float = 0.0
) -> list[Record]:
    """What becomes of random arrivals; steps are noisy, and slower and faster every two minutes."""
    draws = np.random.default_rng(0)
    arrival_s, model = draw_models([Window(3 * count / rate, rate, cv)], np.ones(1), draws)
    lengths = uniform_lengths((PROMPT, PROMPT), (ANSWER, ANSWER))
    trace = make(arrival_s, lengths, draws, model, ("m",)).head(count)
    limits = Limits(num_blocks=20_000, model_context=1024, stages=cost.stages, max_waiting=count)
    latency = LatencyClass(ttft_s=TTFT_S, tpot_s=TPOT_S)
    policy = Policy(classes=(latency,), refuses_late=True)
    noise, now_s = np.random.default_rng(1), 0.0

    def noisy(shape: StepShape) -> tuple[float, ...]:
        nonlocal now_s
        slower = drift * math.sin(2 * math.pi * now_s / 120)
        factor = math.exp(0.1 * noise.standard_normal() + slower)
        found = tuple(factor * seconds for seconds in cost(shape))
        now_s += found[0]
        return found

    return simulate(trace, [Replica(limits, noisy, policy)])


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("load", [0.5, 2.0, 4.0])
def test_what_is_admitted_keeps_its_objectives(cost: LinearCost, load: float) -> None:
    records = served(cost, load * capacity(cost))
    done = [record for record in records if record.state is State.FINISHED]
    kept = [r for r in done if r.ttft_s <= TTFT_S and r.tpot_s <= TPOT_S]
    assert len(kept) >= 0.97 * len(done)
    if load < 1:
        assert len(done) >= 0.98 * len(records)
    else:  # and not by refusing more than it must
        span_s = max(record.finish_s for record in done)
        assert len(kept) / span_s >= 0.65 * capacity(cost)


def test_a_machine_that_grows_slower_runs_fewer() -> None:
    """By 35 % within half a minute, as long as two answers."""
    cost = COSTS["rows"]
    records = served(cost, 2 * capacity(cost), count=4000, drift=0.3)
    done = [record for record in records if record.state is State.FINISHED]
    kept = [r for r in done if r.ttft_s <= TTFT_S and r.tpot_s <= TPOT_S]
    assert len(kept) >= 0.97 * len(done)


def test_bursts_do_not_end_in_refusing_all() -> None:
    cost = COSTS["rows"]
    records = served(cost, 2 * capacity(cost), cv=4.0)
    half = records[len(records) // 2 :]
    done = [record for record in half if record.state is State.FINISHED]
    assert len(done) >= 0.25 * len(half)
    assert sum(r.ttft_s <= TTFT_S and r.tpot_s <= TPOT_S for r in done) >= 0.85 * len(done)


def test_as_many_run_as_steps_of_the_objective_hold() -> None:
    """Steps of 10 ms and 2 ms a row, two of them prompt tokens beside each decode: 6 ms each."""
    pace = Pace(1000)
    assert pace.most(0.1) == math.inf, "nothing is known yet"
    for number in range(1, 200):
        decodes, prompts = 1 + number % 10, 2 * (1 + number % 10)
        pace.note(0.01 + 0.002 * (decodes + prompts), 0.1, decodes, prompts)
    assert [pace.most(objective_s) for objective_s in (0.1, 0.0999, 0.0171)] == [15, 14, 1]
    assert pace.most(math.inf) == math.inf
    assert pace.most(0.015) == math.inf, "an objective that nothing keeps holds nobody back"
    assert pace.token_s(15) == pytest.approx(0.1)


def test_nobody_is_held_back_for_those_of_lower_priority() -> None:
    classes = (
        LatencyClass(name="chat", tpot_s=0.05),
        LatencyClass(name="bulk", tpot_s=0.05, priority=1),
    )
    limits = Limits(num_blocks=500, model_context=256, token_budget=512)
    scheduler = Scheduler(limits, Policy(classes=classes))
    now_s, started = 0.0, dict[int, float]()
    for number, name in enumerate(["bulk"] * 40 + ["chat"] * 2):
        prompt = [number] * 8
        request = Request(id=number, prompt=prompt, max_tokens=200, latency_class=name)
        scheduler.admit(request, now_s)
        step = scheduler.plan(now_s)
        assert step is not None
        now_s += 0.01 * (1 + len(step.decodes))
        scheduler.complete(step.id, [1] * len(scheduler.flights[0].samplers), now_s)
        started[number] = scheduler.load.num_waiting
    assert 0 < started[39] == started[40] == started[41]


def test_errors_rise_at_once_and_fall_slowly() -> None:
    errors = Errors()
    for _ in range(20):
        errors.note(1.0, 1.5)
    assert errors.most_s == pytest.approx(0.5, rel=0.2)
    for _ in range(20):
        errors.note(1.0, 1.0)
    assert errors.most_s > 0.35
    for _ in range(2000):
        errors.note(1.0, 1.0)
    assert errors.most_s < 0.01
