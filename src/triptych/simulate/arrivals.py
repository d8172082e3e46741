"""When requests arrive: Gamma processes in windows, drawn, fitted to a trace, and scaled.

In a Gamma process the times between arrivals are independent with mean 1/rate and coefficient of
variation CV: shape 1/CV^2, scale CV^2/rate. CV 1 is a Poisson process; a larger one is bursty.
Piecewise rates are several windows. Source: AlpaServe (2302.11665), section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.errors import InputError, Problem

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """A stretch of time with one rate and one burstiness."""

    duration_s: float
    rate_per_s: float
    cv: float = 1.0


def draw(windows: Sequence[Window], rng: np.random.Generator) -> Floats:
    """Arrival times in seconds from 0, sorted; the process starts anew in each window."""
    start_s, parts = 0.0, [np.empty(0)]
    for window in windows:
        parts.append(start_s + _renewals(window, rng))
        start_s += window.duration_s
    return np.concatenate(parts)


def _renewals(window: Window, rng: np.random.Generator) -> Floats:
    """Arrivals of one window, from its start."""
    duration_s, rate, cv = window
    if not (duration_s > 0 and rate >= 0 and cv >= 0):
        raise InputError(Problem(f"{window}", "duration above 0, rate and CV from 0"))
    if rate == 0:
        return np.empty(0)
    at_s, parts = 0.0, []
    while at_s < duration_s:
        count = int((duration_s - at_s) * rate * 1.1) + 16
        gaps_s = rng.gamma(1 / cv**2, cv**2 / rate, count) if cv else np.full(count, 1 / rate)
        times_s = at_s + np.cumsum(gaps_s)
        at_s = float(times_s[-1])
        parts.append(times_s)
    found = np.concatenate(parts)
    return found[found < duration_s]


def fit(arrival_s: Floats, window_s: float, end_s: float | None = None) -> list[Window]:
    """The Gamma windows of a trace: rate by count, CV by the gaps inside each window.

    A window with fewer than 3 arrivals shows no burstiness: its CV is 1.
    """
    if end_s is None:
        end_s = float(arrival_s.max(initial=0.0))
    windows = []
    for start_s in np.arange(0.0, end_s, window_s).tolist():
        stop_s = start_s + window_s
        is_last = stop_s >= end_s
        duration_s = end_s - start_s if is_last else window_s
        before = arrival_s <= end_s if is_last else arrival_s < stop_s
        inside = arrival_s[(arrival_s >= start_s) & before]
        gaps_s = np.diff(inside)
        cv = float(gaps_s.std() / gaps_s.mean()) if len(inside) > 2 and gaps_s.mean() else 1.0
        windows.append(Window(duration_s, len(inside) / duration_s, cv))
    return windows


def scaled(windows: Sequence[Window], rate: float = 1.0, cv: float = 1.0) -> list[Window]:
    """The same windows with rates and CVs multiplied."""
    return [Window(w.duration_s, w.rate_per_s * rate, w.cv * cv) for w in windows]


def power_law_shares(count: int, exponent: float) -> Floats:
    """Shares of `count` models, the i-th in proportion to i^-exponent; they add up to 1."""
    weights: Floats = np.arange(1, count + 1, dtype=float) ** -exponent
    shares: Floats = weights / weights.sum()
    return shares


def draw_models(
    windows: Sequence[Window], shares: Floats, rng: np.random.Generator
) -> tuple[Floats, NDArray[np.int64]]:
    """Arrivals of several models, each a process of its own at its share of the rate.

    Returns:
        Times in seconds, sorted, and the index of the model of each; equal times in model order.

    """
    times = [draw(scaled(windows, rate=float(share)), rng) for share in shares]
    models = np.repeat(np.arange(len(times)), [len(t) for t in times])
    merged = np.concatenate([np.empty(0), *times])
    order = np.argsort(merged, kind="stable")
    return merged[order], models[order]
