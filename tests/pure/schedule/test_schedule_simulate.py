"""Simulated = closed form, and the worked examples of the literature."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import ScheduleError
from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.simulate import peak_in_flight, simulate

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 13)]


def unit(action: Action) -> float:
    """F=1, B=2."""
    return 1.0 if action.kind is Kind.F else 2.0


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "makespan_s"), [(4, 8, 33), (4, 4, 21), (2, 4, 15)]
)
def test_makespans_of_the_worked_examples(
    name: str, num_ranks: int, num_microbatches: int, makespan_s: float
) -> None:
    timeline = simulate(build_program(name, num_ranks, num_microbatches), unit)
    assert timeline.makespan_s == makespan_s


def test_1f1b_of_8_ranks_and_24_microbatches_takes_93_with_bubble_7_of_31() -> None:
    timeline = simulate(build_program("1f1b", 8, 24), unit)
    assert timeline.makespan_s == 93
    assert timeline.bubble_fraction == pytest.approx(7 / 31, rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_4_ranks_8_microbatches_idle_9_each_with_bubble_3_of_11(name: str) -> None:
    timeline = simulate(build_program(name, 4, 8), unit)
    assert [33 - timeline.busy_s(rank) for rank in range(4)] == [9, 9, 9, 9]
    assert timeline.idle_s == 36
    assert timeline.bubble_over_ideal == pytest.approx(3 / 8, rel=1e-12)
    assert timeline.bubble_fraction == pytest.approx(3 / 11, rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_has_its_closed_form_for_all_sizes(name: str) -> None:
    for p, m in SIZES:
        timeline = simulate(build_program(name, p, m), unit)
        assert timeline.makespan_s == (m + p - 1) * 3
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m, abs=1e-12)


def test_peaks_of_the_worked_examples() -> None:
    assert peak_in_flight(build_program("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert peak_in_flight(build_program("1f1b", 4, 8)) == (4, 3, 2, 1)


def test_peaks_have_their_closed_form_for_all_sizes() -> None:
    for p, m in SIZES:
        assert peak_in_flight(build_program("gpipe", p, m)) == (m,) * p
        assert peak_in_flight(build_program("1f1b", p, m)) == tuple(
            min(m, p - rank) for rank in range(p)
        )


def test_a_split_backward_frees_at_its_input_gradient() -> None:
    program = build_program("1f1b", 1, 2)
    split = tuple(map(Action.parse, ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]))
    assert peak_in_flight(replace(program, actions=(split,))) == (1,)


def test_transfers_delay_each_hop_there_and_back() -> None:
    # One micro-batch on p ranks: p forwards, p backwards, 2(p-1) hops.
    timeline = simulate(build_program("1f1b", 4, 1), unit, lambda action: 0.5)
    assert timeline.makespan_s == 4 * 3 + 6 * 0.5


def test_transfer_is_asked_about_the_compute_that_produces_the_message() -> None:
    asked = []

    def transfer(action: Action) -> float:
        asked.append(str(action))
        return 0.0

    simulate(build_program("1f1b", 2, 1), unit, transfer)
    assert sorted(asked) == ["0F0", "1B0"]


def test_messages_written_out_change_nothing() -> None:
    program = build_program("1f1b", 4, 6)
    alone = simulate(program, unit, lambda action: 0.1)
    assert simulate(with_communication(program), unit, lambda action: 0.1) == alone


def test_the_slowest_stage_sets_the_pace() -> None:
    # Pipeline latency of unequal stages: sum of t_i + (m-1) max t_i (Zheng et al. 2022, eq. 2).
    stage_s = (1.0, 3.0, 2.0)
    forward_only = simulate(
        build_program("1f1b", 3, 5),
        lambda action: stage_s[action.stage] if action.kind is Kind.F else 0.0,
    )
    last_forward = max(s.end_s for s in forward_only.spans if s.label == "2F4")
    assert last_forward == sum(stage_s) + 4 * max(stage_s)


def test_a_program_that_never_ends_shows_who_waits_for_what() -> None:
    program = build_program("1f1b", 2, 1)
    backwards = tuple(reversed(program.actions[0]))
    with pytest.raises(ScheduleError) as caught:
        simulate(replace(program, actions=(backwards, program.actions[1])), unit)
    text = str(caught.value)
    assert "--> 0B0  0F0  waits for the backward 1B0" in text
    assert "--> 1F0  1B0  waits for 0F0" in text


durations = st.floats(min_value=0.01, max_value=10, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    p=st.integers(1, 6),
    m=st.integers(1, 9),
    data=st.data(),
)
def test_a_timeline_keeps_every_dependency(name: str, p: int, m: int, data: st.DataObject) -> None:
    program = build_program(name, p, m)
    seconds = {action: data.draw(durations) for row in program.actions for action in row}
    hop_s = data.draw(durations)
    timeline = simulate(program, seconds.__getitem__, lambda action: hop_s)
    spans = {span.label: span for span in timeline.spans}
    assert len(spans) == 2 * p * m
    for stage in range(p):
        for index in range(m):
            forward, backward = spans[f"{stage}F{index}"], spans[f"{stage}B{index}"]
            assert forward.end_s <= backward.start_s
            if stage > 0:
                assert spans[f"{stage - 1}F{index}"].end_s + hop_s <= forward.start_s
                assert backward.end_s + hop_s <= spans[f"{stage - 1}B{index}"].start_s


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 9), data=st.data())
def test_no_time_is_lost_on_the_critical_rank_and_none_overlaps(
    p: int, m: int, data: st.DataObject
) -> None:
    program = build_program("1f1b", p, m)
    seconds = {action: data.draw(durations) for row in program.actions for action in row}
    timeline = simulate(program, seconds.__getitem__)
    for rank, row in enumerate(program.actions):
        own = [span for span in timeline.spans if span.rank == rank]
        assert [span.label for span in own] == [str(action) for action in row]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    busiest_s = max(timeline.busy_s(rank) for rank in range(p))
    assert timeline.makespan_s >= busiest_s - 1e-9
    assert 0 <= timeline.bubble_fraction < 1
