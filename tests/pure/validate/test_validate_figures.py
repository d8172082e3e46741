"""The figures of a validation, each by hand."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.validate.figures import Outcome, bars, errors, fits, quantile, quantity, ranking


def outcome(**changes: Any) -> Outcome:
    base = Outcome(
        id="a-1",
        source="a",
        group=("a",),
        plan="p",
        predicted_s=1.0,
        low_s=0.9,
        high_s=1.1,
        measured_s=1.0,
        predicted_bytes=None,
        measured_bytes=None,
        fits=True,
        ran_out=False,
    )
    return base._replace(**changes)


def timed(source: str, plan: str, predicted_s: float, measured_s: float) -> Outcome:
    return outcome(
        source=source, group=(source,), plan=plan, predicted_s=predicted_s, measured_s=measured_s
    )


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.9) == pytest.approx(1.9)


def test_errors_of_a_few_rows() -> None:
    found = errors([0.1, -0.3, 0.2])
    assert found["median_abs_rel_error"] == pytest.approx(0.2)
    assert found["mean_abs_rel_error"] == pytest.approx(0.2)
    assert found["p90_abs_rel_error"] == pytest.approx(0.28)
    assert found["bias"] == pytest.approx(0.0)
    assert found["n"] == 3
    assert errors([])["n"] == 0 and errors([])["bias"] is None


def test_a_large_source_does_not_outvote_a_small_one() -> None:
    rows = [timed("a", "p", 1.1, 1.0)] * 9 + [timed("b", "p", 1.3, 1.0)]
    found = quantity(rows, lambda one: one.time_error)
    assert found["mean_abs_rel_error"] == pytest.approx(0.12)
    assert found["by_source"]["a"]["mean_abs_rel_error"] == pytest.approx(0.1)
    assert found["source_mean"]["mean_abs_rel_error"] == pytest.approx(0.2)
    assert (found["n"], found["source_mean"]["n"]) == (10, 2)
    assert found["worst_source"] == "b"
    assert quantity([], lambda one: one.time_error)["worst_source"] is None


def test_pairs_that_differ_have_an_order() -> None:
    rows = [
        timed("a", "p", 1.0, 1.00),
        timed("a", "q", 1.2, 1.02),  # as fast as p, within 5 %
        timed("a", "r", 0.9, 1.50),  # slowest, predicted fastest
        timed("b", "p", 1.0, 1.00),  # another source: no pair with those
        timed("b", "q", 2.0, 3.00),
        timed("c", "p", 1.0, 1.00),  # the same plan twice: no pair
        timed("c", "p", 1.0, 2.00),
    ]
    found = ranking(rows)
    assert (found["pairs"], found["agree"]) == (3, 1)
    assert found["source_mean"] == pytest.approx((0.0 + 1.0) / 2)
    assert found["regret"] == pytest.approx((1.5 + 1.0) / 2)


def test_nothing_to_rank() -> None:
    found = ranking([timed("a", "p", 1.0, 1.0)])
    assert (found["pairs"], found["regret"], found["source_mean"]) == (0, None, None)


def test_rows_that_did_not_fit_and_rows_that_ran() -> None:
    rows = [
        outcome(ran_out=True, fits=False),
        outcome(ran_out=True, fits=True),
        outcome(),
        outcome(fits=False),
        outcome(),
    ]
    assert fits(rows) == ({"rows": 2, "predicted_oom": 1}, {"ran": 3, "predicted_to_fit": 2})


def test_bars_hold_what_lies_inside() -> None:
    rows = [
        outcome(measured_s=1.05),
        outcome(measured_s=1.2),
        outcome(measured_s=0.85),
        outcome(predicted_s=2.0, low_s=1.0, high_s=3.0, measured_s=2.9),
        outcome(measured_s=None),
    ]
    coverage, half_width = bars(rows)
    assert coverage == pytest.approx(0.5)
    assert half_width == pytest.approx(0.1)
    assert bars([]) == (None, None)
