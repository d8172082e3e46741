"""Predicted waits: work ahead over recent throughput, and what overtakes meanwhile."""

from __future__ import annotations

import pytest

from triptych.serve.core.forecast import Forecast, Recent


def busy(tokens: int = 100, starts: int = 1, steps: int = 400) -> Forecast:
    """Steps of 0.1 s that leave prompts over: 1,000 tokens and 10 requests a second."""
    forecast = Forecast()
    for _ in range(steps):
        forecast.completed(0.1, tokens, starts, is_saturated=True)
    return forecast


def test_recent_rates_are_averages_that_follow_changes() -> None:
    recent = Recent(half_life_s=1.0)
    assert recent.rates() == (0.0, 0.0)
    for tokens in (10, 20):
        for _ in range(200):
            recent.note(0.1, tokens, 1)
        assert recent.rates() == pytest.approx((tokens * 10, 10), rel=0.05)


def test_the_wait_is_the_longer_of_tokens_and_starts_after_the_steps_in_flight() -> None:
    forecast = busy()
    assert forecast.wait_s(2000, 1, 1.0, 0, 40.0) == pytest.approx(2.0, rel=0.02)
    assert forecast.wait_s(20, 50, 1.0, 0, 40.0) == pytest.approx(5.0, rel=0.02)
    assert forecast.wait_s(2000, 1, 1.0, 2, 40.0) == pytest.approx(2.2, rel=0.02)


def test_steps_with_room_for_more_say_nothing_of_throughput() -> None:
    forecast = busy()
    for _ in range(100):
        forecast.completed(0.1, 1, 0, is_saturated=False)
    assert forecast.wait_s(2000, 1, 1.0, 0, 40.0) == pytest.approx(2.0, rel=0.02)
    assert Forecast().wait_s(2000, 1, 1.0, 3, 40.0) == 0.0


def test_later_requests_of_a_shorter_lead_overtake() -> None:
    forecast = busy(starts=100)
    for number in range(800):  # 500 tokens a second of lead 1
        forecast.arrived(1.0, 25, 0.05 * number)
    alone = forecast.wait_s(2000, 1, 1.0, 0, 40.0)
    assert alone == pytest.approx(2.0, rel=0.02)  # its equals do not overtake
    assert forecast.wait_s(2000, 1, 60.0, 0, 40.0) == pytest.approx(4.0, rel=0.05)
    # They have not come for ten minutes: nobody expects them.
    assert forecast.wait_s(2000, 1, 60.0, 0, 640.0) == pytest.approx(2.0, rel=0.02)
    # 1.5 s later they are due after it: 750 tokens done, then all of the rate for the rest.
    assert forecast.wait_s(2000, 1, 2.5, 0, 40.0) == pytest.approx(1.5 + 1.25, rel=0.05)


def test_an_overload_of_overtakers_ends_with_the_difference_of_leads() -> None:
    forecast = busy(starts=100)
    for number in range(800):  # 2,000 tokens a second
        forecast.arrived(1.0, 100, 0.05 * number)
    # 10 s in which the backlog grows by 1,000 tokens a second.
    assert forecast.wait_s(2000, 1, 11.0, 0, 40.0) == pytest.approx(10 + 12, rel=0.05)
