"""Timelines: predicted and recorded ones have one type."""

from __future__ import annotations

import json

import pytest

from triptych.errors import InputError
from triptych.schedule.generate import build_program
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Span, Timeline, Work, microbatch_of, work_of

RECORDED = Timeline(
    (
        Span(0, "0F0", 10.0, 11.0),
        Span(0, "recv", 11.0, 14.0),
        Span(0, "0B0", 14.0, 16.0),
        Span(1, "1F0", 11.0, 12.0),
        Span(1, "1B0", 12.0, 14.0),
        Span(0, "data_comm", 16.0, 17.0),
        Span(0, "optimizer", 17.0, 18.0),
    ),
    num_ranks=2,
)


@pytest.mark.parametrize(
    ("label", "work"),
    [
        ("2F0", Work.FORWARD),
        ("11B37", Work.BACKWARD),
        ("0I1", Work.INPUT_GRADIENT),
        ("0W1", Work.WEIGHT_GRADIENT),
        ("0SEND_F1", Work.COMMUNICATION),
        ("1RECV_B3", Work.WAITING),
        ("recv", Work.WAITING),
        ("pipeline_comm", Work.WAITING),
        ("send", Work.COMMUNICATION),
        ("data_comm", Work.COMMUNICATION),
        ("tensor_comm", Work.COMMUNICATION),
        ("optimizer", Work.OPTIMIZER),
        ("data loading", Work.OTHER),
        ("commit", Work.OTHER),
    ],
)
def test_a_label_names_its_sort_of_work(label: str, work: Work) -> None:
    assert work_of(label) is work


def test_only_compute_has_a_microbatch_number() -> None:
    assert [microbatch_of(label) for label in ("2F13", "1SEND_F2", "recv")] == ["13", "", ""]


def test_a_timeline_survives_json() -> None:
    for timeline in (RECORDED, simulate(build_program("1f1b", 3, 4), lambda action: 0.1)):
        assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_json_has_a_schema_version() -> None:
    assert RECORDED.to_json()["schema_version"] == 1


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema_version": 2, "num_ranks": 1, "spans": []},
        {"schema_version": 1, "spans": []},
        {"schema_version": 1, "num_ranks": 1, "spans": [[0, "0F0", 1.0]]},
        {"schema_version": 1, "num_ranks": 1, "spans": [[0, "0F0", "soon", 2.0]]},
    ],
)
def test_json_of_another_kind_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(InputError, match="timeline"):
        Timeline.from_json(document)


def test_waiting_and_the_optimizer_are_not_busy_time() -> None:
    assert (RECORDED.busy_s(0), RECORDED.busy_s(1)) == (3.0, 3.0)


def test_the_bubble_is_counted_between_first_and_last_compute() -> None:
    assert RECORDED.makespan_s == 8.0
    assert RECORDED.idle_s == 2 * 6.0 - 6.0
    assert RECORDED.bubble_fraction == 0.5
    assert RECORDED.bubble_over_ideal == 1.0


def test_an_empty_timeline_has_no_bubble() -> None:
    empty = Timeline((), num_ranks=2)
    assert (empty.makespan_s, empty.bubble_fraction, empty.bubble_over_ideal) == (0.0, 0.0, 0.0)


def test_the_longest_span_is_that_of_one_rank_wherever_it_starts() -> None:
    spans = (Span(0, "0F0", 0, 2), Span(1, "1F0", 2, 3), Span(1, "1B0", 4, 5))
    timeline = Timeline(spans, 2)
    assert timeline.longest_span_s == 3
    assert timeline.makespan_s == 5
    assert timeline.bubble_inside_spans == pytest.approx(1 / 3)


def test_chunks_are_counted_in_each_rank_by_stage() -> None:
    spans = (Span(0, "3F0", 0, 1), Span(0, "0F0", 1, 2), Span(1, "1F0", 0, 1), Span(1, "2W0", 1, 2))
    assert Timeline(spans, 2).chunk_of_stage == {0: 0, 3: 1, 1: 0, 2: 1}
