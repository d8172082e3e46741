"""The automatic zero-bubble schedule keeps to its memory and beats what it is compared with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import ScheduleError
from triptych.schedule.check import check
from triptych.schedule.generate import Durations, Memory, build_program, zero_bubble_program
from triptych.schedule.program import Program
from triptych.schedule.simulate import peak_held, simulate

seconds = st.floats(min_value=0.1, max_value=3.0)
some_durations = st.builds(
    Durations,
    forward_s=seconds,
    input_s=seconds,
    weight_s=seconds,
    hop_s=st.sampled_from([0.0, 0.05, 0.7]),
)


def longest_span_s(program: Program, durations: Durations) -> float:
    made = simulate(program, lambda a: durations.of(a.kind), lambda _: durations.hop_s)
    return made.longest_span_s


@settings(max_examples=40, deadline=None)
@given(
    p=st.integers(1, 8),
    m=st.integers(1, 24),
    limit=st.integers(1, 20),
    weight_share=st.sampled_from([0.0, 0.4, 1.0]),
    durations=some_durations,
)
def test_it_is_legal_and_no_rank_holds_more_than_its_memory(
    p: int, m: int, limit: int, weight_share: float, durations: Durations
) -> None:
    memory = Memory(microbatches=limit, weight_share=weight_share)
    program = zero_bubble_program(p, m, memory=memory, durations=durations)
    check(program)
    assert max(peak_held(program, weight_share=weight_share)) <= limit * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(2, 20), durations=some_durations)
def test_it_is_never_slower_than_zb_h1_and_h2_in_the_same_memory(
    p: int, m: int, durations: Durations
) -> None:
    for name, microbatches in (("zb-h1", p), ("zb-h2", 2 * p - 1)):
        if name == "zb-h1" or m >= 2 * p - 1:
            memory = Memory(microbatches=microbatches)
            found = zero_bubble_program(p, m, memory=memory, durations=durations)
            by_hand_s = longest_span_s(build_program(name, p, m), durations)
            assert longest_span_s(found, durations) <= by_hand_s * (1 + 1e-9)


def test_more_memory_than_zb_h2_removes_bubbles_that_unequal_times_leave() -> None:
    durations = Durations(forward_s=1.0, input_s=1.0, weight_s=0.6, hop_s=0.02)
    h2_s = longest_span_s(build_program("zb-h2", 4, 16), durations)
    program = zero_bubble_program(4, 16, memory=Memory(microbatches=12), durations=durations)
    assert longest_span_s(program, durations) < h2_s - 2 * 0.6


def test_by_name_it_takes_equal_times_and_twice_the_memory_of_1f1b() -> None:
    program = zero_bubble_program(4, 8, memory=Memory(microbatches=8), durations=Durations())
    assert build_program("zb-auto", 4, 8) == program


def test_one_microbatch_of_memory_is_enough() -> None:
    program = zero_bubble_program(3, 2, memory=Memory(microbatches=1))
    assert [str(action) for action in program.actions[0]] == [
        "0F0",
        "0I0",
        "0W0",
        "0F1",
        "0I1",
        "0W1",
    ]


def test_less_memory_than_one_microbatch_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"0.5 micro-batches(.|\n)*at least one"):
        zero_bubble_program(4, 8, memory=Memory(microbatches=0.5))
