"""The check accepts every generated program and rejects each kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from triptych.errors import ScheduleError
from triptych.schedule.action import Action
from triptych.schedule.check import check, needs_asynchronous_sends
from triptych.schedule.generate import SCHEDULES, build_program, gpipe, one_f_one_b
from triptych.schedule.passes import with_communication
from triptych.schedule.program import Program

Row = list[str]


def program_of(*rows: str, placement: tuple[int, ...], num_microbatches: int) -> Program:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Program(
        name="test", placement=placement, num_microbatches=num_microbatches, actions=actions
    )


def damaged(program: Program, rank: int, damage: Callable[[Row], object]) -> Program:
    """The program with one rank's row changed in place by `damage`."""
    rows = [[str(action) for action in row] for row in program.actions]
    damage(rows[rank])
    return replace(program, actions=tuple(tuple(map(Action.parse, row)) for row in rows))


def moved(name: str, before: str) -> Callable[[Row], None]:
    """Moves an action to just before another one."""

    def damage(row: Row) -> None:
        row.remove(name)
        row.insert(row.index(before), name)

    return damage


def swapped(first: str, second: str) -> Callable[[Row], None]:
    def damage(row: Row) -> None:
        one, two = row.index(first), row.index(second)
        row[one], row[two] = row[two], row[one]

    return damage


def renamed(old: str, new: str) -> Callable[[Row], None]:
    def damage(row: Row) -> None:
        row[row.index(old)] = new

    return damage


def faults(program: Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(program)
    return str(caught.value)


COMPLETE = with_communication(one_f_one_b(3, 4))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_generated_programs_are_legal(name: str, num_ranks: int) -> None:
    for num_microbatches in range(1, 13):
        bare = build_program(name, num_ranks, num_microbatches)
        check(bare)
        check(with_communication(bare))


def test_a_split_backward_is_legal() -> None:
    check(program_of("0F0 0I0 0W0", "1F0 1I0 1W0", placement=(0, 1), num_microbatches=1))


def test_a_v_shaped_placement_is_legal() -> None:
    check(
        program_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0), num_microbatches=1)
    )


@pytest.mark.parametrize(
    ("rank", "damage", "expected"),
    [
        (0, lambda row: row.remove("0F1"), "0 times 0F1"),
        (1, lambda row: row.append("1F2"), "2 times 1F2"),
        (2, lambda row: row.remove("2B3"), "stage 2, micro-batch 3: B, I, W occur (0, 0, 0)"),
        (2, renamed("2B3", "2I3"), "stage 2, micro-batch 3: B, I, W occur (0, 1, 0)"),
        (2, lambda row: row.append("2W3"), "B, I, W occur (1, 0, 1)"),
        (2, moved("2B1", before="2F1"), "2B1 stands before 2F1"),
        (1, moved("1F1", before="1RECV_F1"), "1F1 stands before 1RECV_F1"),
        (1, moved("1B1", before="1RECV_B1"), "1B1 stands before 1RECV_B1"),
        (1, moved("1SEND_F1", before="1F1"), "1SEND_F1 stands before 1F1"),
        (1, moved("1SEND_B1", before="1B1"), "1SEND_B1 stands before 1B1"),
        (0, lambda row: row.remove("0SEND_F2"), "0SEND_F2 is missing"),
        (2, lambda row: row.remove("2RECV_F2"), "2RECV_F2 is missing"),
        (0, lambda row: row.append("0SEND_F2"), "2 times 0SEND_F2"),
        (0, lambda row: row.append("1F0"), "rank 0: 1F0\n    rule: stage 1 is placed on rank 1"),
        (0, lambda row: row.append("7F0"), "rank 0: 7F0\n    rule: stages are 0 to 2"),
        (0, lambda row: row.append("0F4"), "rank 0: 0F4\n    rule: micro-batches are 0 to 3"),
        (0, lambda row: row.append("0SEND_B0"), "there is no stage at the other end"),
        (0, swapped("0SEND_F0", "0SEND_F2"), "0SEND_F2 stands before 0F2"),
    ],
)
def test_each_kind_of_damage_is_named(
    rank: int, damage: Callable[[Row], object], expected: str
) -> None:
    assert expected in faults(damaged(COMPLETE, rank, damage))


def test_w_before_i_is_named() -> None:
    program = program_of("0F0 0W0 0I0", placement=(0,), num_microbatches=1)
    assert "0W0 stands before 0I0" in faults(program)


def test_order_of_stages_on_one_rank_is_named() -> None:
    program = program_of("1F0 0F0 0B0 1B0", placement=(0, 0), num_microbatches=1)
    text = faults(program)
    assert "1F0 stands before 0F0" in text
    assert "0B0 stands before 1B0" in text


def test_a_message_between_stages_of_one_rank_is_named() -> None:
    program = program_of("0F0 0SEND_F0 1F0 1B0 0B0", placement=(0, 0), num_microbatches=1)
    assert "stages 0 and 1 share the rank: no message" in faults(program)


def test_a_placement_on_a_rank_that_does_not_exist_is_named() -> None:
    program = program_of("0F0 0B0", placement=(0, 3), num_microbatches=1)
    assert "stage 1 is placed on rank 3" in faults(program)


def test_several_faults_are_listed_together() -> None:
    once = damaged(COMPLETE, 0, lambda row: row.remove("0F1"))
    text = faults(damaged(once, 2, moved("2B1", before="2F1")))
    assert "0 times 0F1" in text
    assert "2B1 stands before 2F1" in text


def test_a_long_list_of_faults_is_cut() -> None:
    empty = program_of("", placement=(0,), num_microbatches=40)
    assert "and 68 more faults" in faults(empty)


def test_sides_of_a_channel_that_disagree_are_shown_with_arrows() -> None:
    # Rank 1 takes micro-batch 1 first; rank 0 sends micro-batch 0 first.
    program = damaged(with_communication(gpipe(2, 2)), 1, swapped("1RECV_F0", "1RECV_F1"))
    program = damaged(program, 1, swapped("1F0", "1F1"))
    text = faults(program)
    assert "rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1" in text
    assert "--> 0SEND_F0" in text
    assert "--> 1RECV_F1" in text


def test_ranks_that_receive_before_they_send_deadlock() -> None:
    # Rank 0 wants the gradient of micro-batch 0 before it sends its activations.
    program = damaged(with_communication(one_f_one_b(2, 2)), 0, moved("0RECV_B0", "0SEND_F0"))
    text = faults(program)
    assert "deadlock: ranks 0, 1 wait for each other" in text
    assert "rank 0: 0F0 --> 0RECV_B0" in text
    assert "waits for 1SEND_B0 of rank 1" in text
    assert "waits for 0SEND_F0 of rank 0" in text


TWO_GRADIENTS_AT_ONCE = (
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 "
    "1RECV_F2 1F2 1RECV_F3 1F3 1B2 1SEND_B2 1B3 1SEND_B3"
)


def test_two_sends_each_way_before_a_receive_deadlock_without_buffers() -> None:
    # Rank 0 stays in its second outstanding send, rank 1 in its own: neither posts a receive.
    program = program_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 "
        "0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
        TWO_GRADIENTS_AT_ONCE,
        placement=(0, 1),
        num_microbatches=4,
    )
    text = faults(program)
    assert "--> 0SEND_F3" in text
    assert "waits for 1RECV_F2 of rank 1 to take 0SEND_F2" in text
    assert "--> 1SEND_B1" in text
    assert "waits for 0RECV_B0 of rank 0 to take 1SEND_B0" in text


def test_one_send_each_way_before_a_receive_is_legal() -> None:
    check(
        program_of(
            "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 "
            "0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
            TWO_GRADIENTS_AT_ONCE,
            placement=(0, 1),
            num_microbatches=4,
        )
    )


@pytest.mark.parametrize(
    ("rank", "name", "before"),
    [(0, "0RECV_B0", "0SEND_F0"), (1, "1RECV_B0", "1RECV_F0"), (2, "2RECV_F1", "2RECV_F0")],
)
def test_a_receive_moved_before_what_it_depends_on_is_caught(
    rank: int, name: str, before: str
) -> None:
    text = faults(damaged(COMPLETE, rank, moved(name, before=before)))
    assert "deadlock" in text or "same order of messages" in text


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_gpipe_runs_with_blocking_sends(num_microbatches: int) -> None:
    assert not needs_asynchronous_sends(gpipe(4, num_microbatches))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 2), (4, 8), (8, 3)])
def test_1f1b_needs_asynchronous_sends(num_ranks: int, num_microbatches: int) -> None:
    assert needs_asynchronous_sends(one_f_one_b(num_ranks, num_microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_microbatch_or_one_rank_runs_with_blocking_sends(name: str) -> None:
    assert not needs_asynchronous_sends(build_program(name, 4, 1))
    assert not needs_asynchronous_sends(build_program(name, 1, 4))
