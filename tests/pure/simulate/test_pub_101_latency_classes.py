"""PUB-101: latency classes with an auditable rule, no starvation, refusal of what is too much."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass, State
from triptych.simulate.arrivals import Window, draw
from triptych.simulate.metrics import by_class, summarize
from triptych.simulate.replica import LinearCost, Record, Replica
from triptych.simulate.run import simulate
from triptych.simulate.trace import Trace, fixed_lengths, make, uniform_lengths

CHAT = LatencyClass(name="chat", ttft_s=0.3, tpot_s=0.1)
BULK = LatencyClass(name="bulk", ttft_s=20.0)
LIMITS = Limits(
    num_blocks=4000, model_context=8192, max_running=64, token_budget=512, prefix_reuse=False
)
COST = LinearCost(fixed_s=0.01, token_s=1e-4)


def policy_of(refuses_late: bool = False) -> Policy:
    return Policy(classes=(CHAT, BULK), ageing_s=30.0, refuses_late=refuses_late)


def one_long_and_twenty_short(names: tuple[str, str]) -> list[Record]:
    """A prompt of 4,000 tokens just before 20 of 20, each class by the kind of prompt."""
    arrival_s = np.array([0.0, *np.linspace(0.01, 0.05, 20)])
    trace = make(arrival_s, fixed_lengths(20, 10), np.random.default_rng(0))
    trace.prompt_tokens[0] = 4000
    return simulate(
        trace, [Replica(LIMITS, COST, policy_of())], class_of=lambda i: names[min(i, 1)]
    )


def test_pub_101_short_prompts_do_not_wait_for_a_long_one_of_another_class() -> None:
    long, *short = one_long_and_twenty_short(("bulk", "chat"))
    in_time = [r.ttft_s <= CHAT.ttft_s and r.tpot_s <= CHAT.tpot_s for r in short]
    assert np.mean(in_time) >= 0.95
    # All that is due before it, its own tokens, and one token of each that decodes meanwhile.
    tokens, steps = 20 * 20 + 4000, (20 * 20 + 4000) / (512 - 20) + 2
    assert long.ttft_s <= tokens * 1e-4 + steps * (0.01 + 20e-4)
    assert long.state is State.FINISHED
    _, *waited = one_long_and_twenty_short(("bulk", "bulk"))
    assert max(r.ttft_s for r in short) < min(r.ttft_s for r in waited)


def overload(refuses_late: bool, seconds: float = 120.0) -> tuple[Trace, list[Record], Replica]:
    """Twice what the replica can take, both classes alike."""
    rng = np.random.default_rng(3)
    # A request costs about (1000 + 20) tokens of 0.1 ms and its share of the fixed time.
    arrival_s = draw([Window(seconds, 2 * 7.4)], rng)
    trace = make(arrival_s, uniform_lengths((500, 1500), (10, 30)), rng)
    replica = Replica(LIMITS, COST, policy_of(refuses_late))
    return trace, simulate(trace, [replica], class_of=lambda i: ("chat", "bulk")[i % 2]), replica


def test_pub_101_under_twice_the_load_the_excess_is_refused_and_the_rest_is_in_time() -> None:
    trace, records, _ = overload(refuses_late=True)
    apart = by_class(records, {"chat": CHAT, "bulk": BULK})
    summary = summarize(records, {"chat": CHAT, "bulk": BULK})
    assert 0.3 < summary.num_refused / len(trace) < 0.65
    for name in ("chat", "bulk"):
        # Predicted: all that are admitted. Simulated within 5 points of that, for each class.
        assert apart[name].attainment_of_admitted.value >= 0.95
    _, everything, _ = overload(refuses_late=False)
    careless = summarize(everything, {"chat": CHAT, "bulk": BULK})
    assert summary.goodput_per_s > 1.5 * careless.goodput_per_s


@pytest.mark.parametrize("refuses_late", [False, True])
def test_pub_101_nothing_starves_under_overload(refuses_late: bool) -> None:
    _, records, replica = overload(refuses_late, seconds=40.0)
    admitted = [record for record in records if record.state is not State.REFUSED]
    assert all(record.state is State.FINISHED for record in admitted)
    assert replica.scheduler.load.num_free_blocks == LIMITS.num_blocks
