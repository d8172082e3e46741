"""Figures and their intervals: checked by hand, and by how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from triptych.serve.core.request import LatencyClass, State
from triptych.simulate.metrics import by_class, mean, percentile, share, summarize
from triptych.simulate.replica import Record


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng, covered = np.random.default_rng(1), np.zeros(4)
    for _ in range(400):
        values = rng.exponential(1.0, 500)
        hits = int((values < math.log(10)).sum())
        for index, (estimate, truth) in enumerate(
            [
                (percentile(values, 50), math.log(2)),
                (percentile(values, 90), math.log(10)),
                (share(hits, 500), 0.9),
                (mean(values), 1.0),
            ]
        ):
            assert estimate.low <= estimate.value <= estimate.high
            covered[index] += estimate.low <= truth <= estimate.high
    assert (covered / 400 > 0.92).all() and (covered / 400 < 0.99).all()


def test_without_values_there_is_no_figure() -> None:
    empty = np.empty(0)
    for estimate in (percentile(empty, 50), share(0, 0), mean(empty)):
        assert all(math.isnan(value) for value in estimate)
    assert share(0, 10).low == 0.0 and share(10, 10).high == pytest.approx(1.0)


def record(number: int, name: str, ttft_s: float, tpot_s: float, tokens: int = 11) -> Record:
    return Record(
        request_id=number,
        latency_class=name,
        arrival_s=float(number),
        prompt_tokens=5,
        output_tokens=tokens,
        state=State.FINISHED,
        first_token_s=number + ttft_s,
        finish_s=number + ttft_s + tpot_s * (tokens - 1),
        num_tokens=tokens,
    )


def test_each_request_is_held_against_its_own_class() -> None:
    classes = {
        "chat": LatencyClass(name="chat", ttft_s=1.0, tpot_s=0.1),
        "bulk": LatencyClass(name="bulk", ttft_s=10.0),
    }
    records = [
        record(0, "chat", 0.5, 0.05),
        record(1, "chat", 1.5, 0.05),
        record(2, "chat", 0.5, 0.15),
        record(3, "bulk", 5.0, 3.0),
        Record(4, "bulk", 4.0, 5, 5, State.REFUSED),
    ]
    summary = summarize(records, classes)
    assert (summary.num_requests, summary.num_refused) == (5, 1)
    assert summary.attainment.value == 2 / 5
    assert summary.attainment_of_admitted.value == 2 / 4
    assert summary.duration_s == pytest.approx(38.0)
    assert summary.goodput_per_s == pytest.approx(2 / 38)
    assert summary.output_tokens_per_s == pytest.approx(44 / 38)
    assert summary.ttft_s[50].value == pytest.approx(1.0)
    apart = by_class(records, classes)
    assert apart["chat"].attainment.value == 1 / 3
    assert apart["bulk"].attainment.value == 1 / 2


def test_an_answer_of_one_token_has_no_tpot() -> None:
    one = record(0, "chat", 0.5, 0.0, tokens=1)
    assert one.tpot_s == 0.0
    summary = summarize([one], {"chat": LatencyClass(name="chat", tpot_s=0.01)})
    assert math.isnan(summary.tpot_s[50].value) and summary.attainment.value == 1.0
