"""Gamma windows: drawn processes have the rate and the CV asked for, and fitting finds them."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.errors import InputError
from triptych.simulate.arrivals import Window, draw, draw_models, fit, power_law_shares, scaled


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_a_drawn_process_has_its_rate_and_its_cv(cv: float) -> None:
    times = draw([Window(20_000.0, 10.0, cv)], np.random.default_rng(1))
    gaps = np.diff(times)
    assert times[0] >= 0 and times[-1] < 20_000 and (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(10.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-6)


def test_piecewise_rates_hold_in_their_windows() -> None:
    windows = [Window(1000.0, 5.0), Window(500.0, 0.0), Window(1000.0, 20.0)]
    times = draw(windows, np.random.default_rng(2))
    counts = np.histogram(times, [0, 1000, 1500, 2500])[0]
    assert counts == pytest.approx([5000, 0, 20_000], rel=0.05)


def test_fitting_a_drawn_trace_gives_its_windows_back() -> None:
    windows = [Window(2000.0, 5.0, 3.0), Window(2000.0, 20.0, 1.0), Window(1000.0, 10.0, 2.0)]
    times = draw(windows, np.random.default_rng(3))
    found = fit(times, 1000.0, end_s=5000.0)
    assert [w.duration_s for w in found] == [1000.0] * 5
    rates, cvs = [w.rate_per_s for w in found], [w.cv for w in found]
    assert rates == pytest.approx([5, 5, 20, 20, 10], rel=0.15)
    assert cvs == pytest.approx([3, 3, 1, 1, 2], rel=0.2)


def test_the_last_window_may_be_short_and_lonely_arrivals_are_poisson() -> None:
    found = fit(np.array([1.0, 12.0, 13.0, 14.0, 15.0]), 10.0)
    assert [w.duration_s for w in found] == [10.0, 5.0]
    assert found[0] == (10.0, 0.1, 1.0)
    assert found[1] == (5.0, 4 / 5.0, 0.0)


def test_no_arrivals_have_no_windows() -> None:
    assert fit(np.empty(0), 10.0) == []
    assert fit(np.empty(0), 10.0, end_s=10.0) == [(10.0, 0.0, 1.0)]


def test_scaling_multiplies_rate_and_cv() -> None:
    assert scaled([Window(5.0, 2.0, 0.5)], rate=3.0, cv=4.0) == [Window(5.0, 6.0, 2.0)]


def test_models_have_power_law_shares_of_the_rate() -> None:
    shares = power_law_shares(4, 1.0)
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25)
    times, models = draw_models([Window(4000.0, 25.0)], shares, np.random.default_rng(4))
    assert (np.diff(times) >= 0).all()
    assert np.bincount(models) / 4000 == pytest.approx([12, 6, 4, 3], rel=0.05)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    one, two = (draw([Window(10.0, 50.0, 2.0)], np.random.default_rng(7)) for _ in range(2))
    assert (one == two).all()


def test_an_impossible_window_is_refused() -> None:
    with pytest.raises(InputError, match="duration above 0"):
        draw([Window(0.0, 1.0)], np.random.default_rng(0))
