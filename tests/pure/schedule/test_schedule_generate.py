"""Programs by name: order rules and fixtures of the literature."""

from __future__ import annotations

from itertools import product

import pytest
from schedule_samples import least

from triptych.errors import ScheduleError
from triptych.schedule.action import Kind
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.program import Program
from triptych.schedule.traits import TRAITS


def row(program: Program, rank: int) -> str:
    return " ".join(str(action).removeprefix(str(rank)) for action in program.actions[rank])


def test_1f1b_first_rank_of_4_with_8_microbatches() -> None:
    expected = "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert row(build_program("1f1b", 4, 8), 0) == expected


def test_1f1b_last_rank_alternates_from_the_start() -> None:
    assert row(build_program("1f1b", 4, 8), 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_1f1b_with_fewer_microbatches_than_stages_warms_up_with_all_of_them() -> None:
    program = build_program("1f1b", 4, 2)
    assert [row(program, rank) for rank in range(4)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_gpipe_runs_backwards_in_reverse() -> None:
    assert row(build_program("gpipe", 3, 3), 1) == "F0 F1 F2 B2 B1 B0"


def test_each_stage_has_a_rank_of_its_own() -> None:
    program = build_program("1f1b", 3, 2)
    assert program.placement == (0, 1, 2)
    assert [program.stages_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_carries_its_name_and_sizes(name: str) -> None:
    program = least(name, 3, 6)
    chunks = TRAITS[name].least_chunks
    assert (program.name, program.num_ranks, program.num_stages) == (name, 3, 3 * chunks)
    assert program.num_microbatches == 6


def test_an_unknown_schedule_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ScheduleError, match=r"'1f1bb' is unknown(.|\n)*works: 1f1b"):
        build_program("1f1bb", 4, 8)


def test_all_wrong_sizes_are_named_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_program("gpip", 0, -1, chunks=0)
    text = str(caught.value)
    for part in ("works: gpipe", "pipeline ranks: 0", "micro-batches: -1", "chunks: 0"):
        assert part in text


def test_every_size_is_legal_or_refused_with_both_numbers_and_what_works() -> None:
    for name, p, m, v in product(SCHEDULES, range(1, 9), range(1, 33), range(1, 5)):
        if not TRAITS[name].allows(p, m, v):
            text = refusal(name, p, m, v)
            too_few = m < TRAITS[name].least_microbatches(p)
            assert (
                f"{m} micro-batches on {p} pipeline ranks with schedule={name}" in text
            ) == too_few
            wrong_chunks = not TRAITS[name].allows_chunks(v)
            assert (f"chunks={v} with schedule={name}" in text) == wrong_chunks
            assert text.count("works: ") == too_few + wrong_chunks


def refusal(name: str, p: int, m: int, v: int) -> str:
    with pytest.raises(ScheduleError) as caught:
        build_program(name, p, m, v)
    return str(caught.value)


def test_too_few_microbatches_are_refused_with_what_works() -> None:
    assert refusal("zb-h2", 4, 6, 1) == (
        "- 6 micro-batches on 4 pipeline ranks with schedule=zb-h2\n"
        "    rule: zb-h2 needs 2p - 1 micro-batches on p pipeline ranks, 7 here\n"
        "    works: 7 micro-batches or more or at most 3 pipeline ranks or schedule=zb-h1"
    )
    assert "dualpipe-v needs 2p micro-batches on p pipeline ranks, 8 here" in refusal(
        "dualpipe-v", 4, 7, 2
    )


def test_wrong_chunks_are_refused_with_the_schedules_that_have_them() -> None:
    assert refusal("zb-v", 4, 8, 3) == (
        "- chunks=3 with schedule=zb-v\n"
        "    rule: each pipeline rank runs 2 stages (chunks) under zb-v\n"
        "    works: chunks=2, or schedule in interleaved, breadth-first"
    )


def test_what_is_said_to_work_does() -> None:
    build_program("zb-h2", 4, 7)
    build_program("zb-h2", 3, 6)
    build_program("zb-h1", 4, 6)
    build_program("zb-v", 4, 7, 2)


def test_the_table_says_who_splits_backwards() -> None:
    for name in SCHEDULES:
        kinds = {action.kind for row in least(name, 3, 6).actions for action in row}
        assert TRAITS[name].splits_backward == (Kind.W in kinds)


def test_a_v_turns_on_the_last_rank() -> None:
    assert build_program("zb-v", 3, 6, 2).placement == (0, 1, 2, 2, 1, 0)
    assert build_program("interleaved", 3, 6, 2).placement == (0, 1, 2, 0, 1, 2)


def test_interleaved_groups_are_as_equal_as_can_be() -> None:
    # 9 micro-batches on 4 ranks: 5, then 4; the first rank starts with the first group.
    row_0 = build_program("interleaved", 4, 9, 2).actions[0]
    forwards = [f"{a.stage}F{a.microbatch}" for a in row_0 if a.kind is Kind.F]
    assert forwards == [
        *(f"{stage}F{index}" for stage in (0, 4) for index in range(5)),
        *(f"{stage}F{index}" for stage in (0, 4) for index in range(5, 9)),
    ]


def test_one_rank_runs_every_schedule() -> None:
    for name in SCHEDULES:
        program = least(name, 1, 3)
        assert set(program.placement) == {0}


def test_zb_v_with_few_microbatches_drops_those_that_do_not_exist() -> None:
    program = build_program("zb-v", 4, 2, 2)
    assert {action.microbatch for row in program.actions for action in row} == {0, 1}
