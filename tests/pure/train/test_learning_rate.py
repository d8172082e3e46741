"""The learning rate is the closed form of the step."""

from __future__ import annotations

import math

import pytest

from triptych.train.learning_rate import LearningRate


def rate(schedule: str, **changes: float) -> LearningRate:
    values = {"peak": 1e-3, "minimum": 1e-5, "warmup_steps": 5, "total_steps": 40, **changes}
    return LearningRate(schedule=schedule, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_a_straight_line_to_the_peak(schedule: str) -> None:
    """User case pub_017."""
    found = [rate(schedule).at(step) for step in range(1, 6)]
    assert found == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3], rel=1e-15)


def test_cosine_is_the_closed_form() -> None:
    """User case pub_017."""
    for step in range(5, 41):
        expected = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * (step - 5) / 35)) / 2
        assert rate("cosine").at(step) == pytest.approx(expected, rel=1e-14)


def test_linear_is_the_closed_form() -> None:
    for step in range(5, 41):
        expected = 1e-5 + (1e-3 - 1e-5) * (1 - (step - 5) / 35)
        assert rate("linear").at(step) == pytest.approx(expected, rel=1e-14)


def test_constant_stays_at_the_peak() -> None:
    assert {rate("constant").at(step) for step in range(5, 60)} == {1e-3}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_last_step_has_the_minimum_and_so_has_every_later_one(schedule: str) -> None:
    assert rate(schedule).at(40) == pytest.approx(1e-5, rel=1e-12)
    assert rate(schedule).at(99) == rate(schedule).at(40)


def test_no_warm_up_starts_near_the_peak() -> None:
    assert rate("linear", warmup_steps=0, total_steps=10, minimum=0.0).at(1) == pytest.approx(9e-4)


def test_a_run_that_is_all_warm_up_ends_at_the_peak() -> None:
    assert rate("cosine", warmup_steps=40).at(40) == pytest.approx(1e-3)


def test_wsd_stays_at_the_peak_and_falls_in_a_line_over_its_last_steps() -> None:
    schedule = rate("wsd", decay_steps=10)
    assert {schedule.at(step) for step in range(5, 31)} == {1e-3}
    for step in range(30, 41):
        expected = 1e-5 + (1e-3 - 1e-5) * (40 - step) / 10
        assert schedule.at(step) == pytest.approx(expected, rel=1e-14)
