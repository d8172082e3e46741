"""Programs by name: order rules and fixtures of the literature."""

from __future__ import annotations

import pytest

from triptych.errors import ScheduleError
from triptych.schedule.generate import SCHEDULES, build_program, gpipe, one_f_one_b
from triptych.schedule.program import Program


def row(program: Program, rank: int) -> str:
    return " ".join(str(action).removeprefix(str(rank)) for action in program.actions[rank])


def test_1f1b_first_rank_of_4_with_8_microbatches() -> None:
    expected = "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert row(one_f_one_b(4, 8), 0) == expected


def test_1f1b_last_rank_alternates_from_the_start() -> None:
    assert row(one_f_one_b(4, 8), 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_1f1b_with_fewer_microbatches_than_stages_warms_up_with_all_of_them() -> None:
    program = one_f_one_b(4, 2)
    assert [row(program, rank) for rank in range(4)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_gpipe_runs_backwards_in_reverse() -> None:
    assert row(gpipe(3, 3), 1) == "F0 F1 F2 B2 B1 B0"


def test_each_stage_has_a_rank_of_its_own() -> None:
    program = one_f_one_b(3, 2)
    assert program.placement == (0, 1, 2)
    assert [program.stages_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_carries_its_name_and_sizes(name: str) -> None:
    program = build_program(name, 3, 5)
    assert (program.name, program.num_ranks, program.num_stages) == (name, 3, 3)
    assert program.num_microbatches == 5


def test_an_unknown_schedule_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ScheduleError, match=r"'1f1bb' is unknown(.|\n)*works: 1f1b"):
        build_program("1f1bb", 4, 8)


def test_all_wrong_sizes_are_named_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_program("gpip", 0, -1, chunks=2)
    text = str(caught.value)
    for part in ("works: gpipe", "pipeline ranks: 0", "micro-batches: -1", "chunks: 2"):
        assert part in text
