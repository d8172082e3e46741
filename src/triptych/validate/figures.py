"""Figures of agreement: errors over rows and sources, order of plans, fit, coverage of bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

DIFFERS = 0.05
"""Measured speeds that differ by more than this have an order."""


class Outcome(NamedTuple):
    """What was predicted and measured of one row; None where it cannot be compared."""

    id: str
    source: str
    group: tuple[str, ...]
    plan: str
    predicted_s: float | None
    low_s: float | None
    high_s: float | None
    measured_s: float | None
    predicted_bytes: float | None
    measured_bytes: float | None
    fits: bool
    ran_out: bool
    assumed: tuple[str, ...] = ()  # columns that matter and are blank

    @property
    def time_error(self) -> float | None:
        """Relative error of the step time."""
        return _error(self.predicted_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak."""
        return _error(self.predicted_bytes, self.measured_bytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None or measured <= 0:
        return None
    return predicted / measured - 1.0


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def errors(values: Sequence[float]) -> dict[str, float | int | None]:
    """Median, mean and 90th percentile of the size of relative errors, and their mean."""
    if not values:
        nothing = ("median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "bias")
        return {**dict.fromkeys(nothing), "n": 0}
    sizes = [abs(value) for value in values]
    return {
        "median_abs_rel_error": quantile(sizes, 0.5),
        "mean_abs_rel_error": sum(sizes) / len(sizes),
        "p90_abs_rel_error": quantile(sizes, 0.9),
        "bias": sum(values) / len(values),
        "n": len(values),
    }


def quantity(
    outcomes: Sequence[Outcome], error: Callable[[Outcome], float | None]
) -> dict[str, Any]:
    """Errors over all rows, by source, averaged over sources, and the source with the largest."""
    by_source: dict[str, list[float]] = {}
    for outcome in outcomes:
        value = error(outcome)
        if value is not None:
            by_source.setdefault(outcome.source, []).append(value)
    return over_sources(by_source)


def over_sources(by_source: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Figures of relative errors: of all, of each source, their mean, and the worst source."""
    everything = [value for values in by_source.values() for value in values]
    tables = {source: errors(values) for source, values in by_source.items()}
    return {
        **errors(everything),
        "by_source": tables,
        "source_mean": source_mean(tables.values()),
        "worst_source": max(tables, key=lambda name: _median(tables[name]), default=None),
    }


def _median(table: Mapping[str, Any]) -> float:
    return float(table["median_abs_rel_error"])


def source_mean(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure averaged over sources; `n` counts the sources."""
    listed = list(tables)
    names = ("median_abs_rel_error", "mean_abs_rel_error", "p90_abs_rel_error", "bias")
    if not listed:
        return {**dict.fromkeys(names), "n": 0}
    means = {name: sum(table[name] for table in listed) / len(listed) for name in names}
    return {**means, "n": len(listed)}


# --- order of plans ------------------------------------------------------------------------------


def ranking(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many pairs of plans for the same work are put in the measured order, and the regret of
    taking the plan that is predicted to be fastest.
    """
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.time_error is not None:
            groups.setdefault(outcome.group, []).append(outcome)
    pairs: dict[str, list[bool]] = {}
    regrets = []
    for group in groups.values():
        if len({outcome.plan for outcome in group}) < 2:
            continue
        regrets.append(_regret(group))
        pairs.setdefault(group[0].source, []).extend(_pairs(group))
    pairs = {source: found for source, found in pairs.items() if found}
    shares = {source: sum(found) / len(found) for source, found in pairs.items()}
    total = sum(map(len, pairs.values()))
    agree = sum(map(sum, pairs.values()))
    return {
        "pairs": total,
        "agree": agree,
        "agree_share": agree / total if total else None,
        "regret": sum(regrets) / len(regrets) if regrets else None,
        "groups": len(regrets),
        "by_source": {s: {"pairs": len(pairs[s]), "agree_share": shares[s]} for s in pairs},
        "source_mean": sum(shares.values()) / len(shares) if shares else None,
    }


def _pairs(group: Sequence[Outcome]) -> Iterable[bool]:
    for one, other in combinations(group, 2):
        assert one.measured_s and other.measured_s and one.predicted_s and other.predicted_s
        slower, faster = (
            max(one.measured_s, other.measured_s),
            min(one.measured_s, other.measured_s),
        )
        if one.plan != other.plan and slower > (1.0 + DIFFERS) * faster:
            yield (one.measured_s < other.measured_s) == (one.predicted_s < other.predicted_s)


def _regret(group: Sequence[Outcome]) -> float:
    picked = min(group, key=lambda outcome: outcome.predicted_s or math.inf)
    best_s = min(outcome.measured_s or math.inf for outcome in group)
    assert picked.measured_s
    return picked.measured_s / best_s


# --- fit and bars --------------------------------------------------------------------------------


def fits(outcomes: Sequence[Outcome]) -> tuple[dict[str, int], dict[str, int]]:
    """Rows that did not fit and how many are predicted so; rows that ran, predicted to fit."""
    failed = [outcome for outcome in outcomes if outcome.ran_out]
    ran = [outcome for outcome in outcomes if not outcome.ran_out]
    return (
        {"rows": len(failed), "predicted_oom": sum(not one.fits for one in failed)},
        {"ran": len(ran), "predicted_to_fit": sum(one.fits for one in ran)},
    )


def bars(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Share of measured step times inside their 80 % bars, and the median relative half-width."""
    inside, widths = [], []
    for one in outcomes:
        if one.time_error is None or one.low_s is None or one.high_s is None:
            continue
        assert one.predicted_s and one.measured_s
        inside.append(one.low_s <= one.measured_s <= one.high_s)
        widths.append((one.high_s - one.low_s) / 2.0 / one.predicted_s)
    if not widths:
        return None, None
    return sum(inside) / len(inside), quantile(widths, 0.5)
