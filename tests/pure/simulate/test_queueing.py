"""Simulated = closed form: M/D/1 and AlpaServe's two models on two devices (its section 3).

W is the mean time from arrival to finish; D the service time, r = lambda x D the total load.
"""

from __future__ import annotations

import numpy as np
import pytest

from triptych.simulate.arrivals import Window, draw, draw_models
from triptych.simulate.single_shot import Group, simulate

REQUESTS = 2_000_000


def mean_time(load: float, stages: tuple[float, ...], groups: int = 1, share: float = 0.5) -> float:
    """Mean seconds of requests of two models with D = 1; each group holds its own or both."""
    windows = [Window(REQUESTS / load, load)]
    rng = np.random.default_rng(17)
    if groups == 2:
        times, models = draw_models(windows, np.array([share, 1 - share]), rng)
        held = [Group({0: stages}), Group({1: stages})]
    else:
        times = draw(windows, rng)
        models = np.zeros(len(times), np.int64)
        held = [Group({0: stages})]
    return float(np.mean(simulate(times, models, held).finish_s - times))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7, 0.8])
def test_m_d_1(load: float) -> None:
    assert mean_time(load, (1.0,)) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.005)


@pytest.mark.parametrize(
    ("load", "simple", "pipeline"), [(0.5, None, None), (1, 1.5, 1.25), (1.5, 2.5, 1.75)]
)
def test_two_models_on_a_device_each_and_on_a_shared_pipeline(
    load: float, simple: float | None, pipeline: float | None
) -> None:
    of_simple, of_pipeline = 1 + load / (4 - 2 * load), 1 + load / (8 - 4 * load)
    assert simple in (None, of_simple) and pipeline in (None, of_pipeline)
    assert mean_time(load, (1.0,), groups=2) == pytest.approx(of_simple, rel=0.005)
    assert mean_time(load, (0.5, 0.5)) == pytest.approx(of_pipeline, rel=0.005)


def test_uneven_shares_hurt_devices_of_their_own() -> None:
    load, p = 1.0, 0.7
    expected = 1 + sum(q**2 * load / (2 * (1 - q * load)) for q in (p, 1 - p))
    assert mean_time(load, (1.0,), groups=2, share=p) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("load", "alpha", "beta"), [(0.5, 1.0692, 1.3333), (1, 1.1315, 1.2361), (1.5, 1.1111, 1.1231)]
)
def test_the_overheads_at_which_the_pipeline_loses_its_gain(
    load: float, alpha: float, beta: float
) -> None:
    simple = 1 + load / (4 - 2 * load)
    r = load
    root = np.sqrt(64 - 96 * r + 56 * r**2 - 12 * r**3 + r**4)
    assert (8 - r**2 - root) / (3 * (2 * r - r**2)) == pytest.approx(alpha, abs=5e-5)
    assert (np.sqrt(8 - 4 * r + r**2) - r) / (2 - r) == pytest.approx(beta, abs=5e-5)
    communication = mean_time(load, (alpha / 2, alpha / 2))
    imbalance = mean_time(load, (beta / 2, 1 - beta / 2))
    assert communication == pytest.approx(simple, rel=0.005)
    assert imbalance == pytest.approx(simple, rel=0.005)
