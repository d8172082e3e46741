"""What users would have seen: percentiles, attainment and goodput, each with its interval.

All intervals are 95 %: of a percentile by order statistics (binomial ranks), of a share by Wilson's
score, of a mean by batch means (requests that follow each other wait for each other, so single
requests are not independent). docs/scheduling.md lists the symbols.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, t

from triptych.serve.core.request import LatencyClass, State
from triptych.simulate.replica import Record

Floats = NDArray[np.float64]
Z_95 = 1.959963984540054


class Estimate(NamedTuple):
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def percentile(values: Floats, q: float) -> Estimate:
    """The q-th percentile (0 < q < 100); without values all are NaN."""
    count = len(values)
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan)
    ranked = np.sort(values)
    low, high = binom.ppf([0.025, 0.975], count, q / 100)
    at = np.clip([low - 1, high], 0, count - 1).astype(int)
    return Estimate(float(np.percentile(ranked, q)), *(float(v) for v in ranked[at]))


def share(hits: int, count: int) -> Estimate:
    """`hits` of `count`, with Wilson's interval; without any all are NaN."""
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan)
    found, spread = hits / count, Z_95**2 / count
    middle = (found + spread / 2) / (1 + spread)
    half = Z_95 * math.sqrt(found * (1 - found) / count + spread / (4 * count)) / (1 + spread)
    return Estimate(found, min(found, middle - half), max(found, middle + half))


def mean(values: Floats, num_batches: int = 20) -> Estimate:
    """The mean, with the interval of the means of batches in order; NaN ends if too few."""
    size = len(values) // num_batches
    value = float(values.mean()) if len(values) else math.nan
    if size < 2:
        return Estimate(value, math.nan, math.nan)
    batches = values[: size * num_batches].reshape(num_batches, size).mean(axis=1)
    half = float(t.ppf(0.975, num_batches - 1) * batches.std(ddof=1) / math.sqrt(num_batches))
    return Estimate(value, value - half, value + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of some requests.

    `attainment` is the share of ALL requests, refused ones included, that finished within both
    objectives; `goodput_per_s` is the number of those a second.
    """

    num_requests: int
    num_refused: int
    duration_s: float  # from the first arrival to the last finish
    attainment: Estimate
    attainment_of_admitted: Estimate
    goodput_per_s: float
    output_tokens_per_s: float
    ttft_mean_s: Estimate
    ttft_s: dict[int, Estimate]  # by percentile
    tpot_s: dict[int, Estimate]
    latency_s: dict[int, Estimate]


def summarize(
    records: Sequence[Record],
    classes: Mapping[str, LatencyClass],
    percentiles: Sequence[int] = (50, 90, 99),
) -> Summary:
    """Figures of all records; each is held against the objectives of its own class."""
    done = [record for record in records if record.state is State.FINISHED]
    refused = sum(record.state is State.REFUSED for record in records)
    in_time = sum(meets(record, classes[record.latency_class]) for record in done)
    ttft_s = np.array([r.ttft_s for r in done])
    tpot_s = np.array([r.tpot_s for r in done if r.num_tokens > 1])
    latency_s = np.array([r.finish_s - r.arrival_s for r in done])
    start_s = min((record.arrival_s for record in records), default=0.0)
    duration_s = max((record.finish_s for record in done), default=start_s) - start_s
    per_s = 1 / duration_s if duration_s else math.nan
    return Summary(
        num_requests=len(records),
        num_refused=refused,
        duration_s=duration_s,
        attainment=share(in_time, len(records)),
        attainment_of_admitted=share(in_time, len(records) - refused),
        goodput_per_s=in_time * per_s,
        output_tokens_per_s=sum(r.num_tokens for r in done) * per_s,
        ttft_mean_s=mean(ttft_s),
        ttft_s={q: percentile(ttft_s, q) for q in percentiles},
        tpot_s={q: percentile(tpot_s, q) for q in percentiles},
        latency_s={q: percentile(latency_s, q) for q in percentiles},
    )


def by_class(records: Sequence[Record], classes: Mapping[str, LatencyClass]) -> dict[str, Summary]:
    """The figures of each latency class apart."""
    return {
        name: summarize([r for r in records if r.latency_class == name], classes)
        for name in classes
    }


def meets(record: Record, latency: LatencyClass) -> bool:
    """Whether a request finished within both objectives of its class."""
    return (
        record.state is State.FINISHED
        and record.ttft_s <= latency.ttft_s
        and record.tpot_s <= latency.tpot_s
    )
