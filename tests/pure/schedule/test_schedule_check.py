"""The check accepts every generated program and rejects each kind of damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_samples import least, legal_sizes

from triptych.errors import ScheduleError
from triptych.schedule.action import COMPUTE, SENDS, Action
from triptych.schedule.check import check
from triptych.schedule.deadlock import channels, find_deadlock
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.messages import messages, partner
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


COMPLETE = with_communication(build_program("1f1b", 3, 4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_generated_programs_are_legal(name: str) -> None:
    for p, m, v in legal_sizes(name, (1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 13)):
        program = with_communication(build_program(name, p, m, v))
        check(program)
        assert find_deadlock(program, queues="rank") == {}


@pytest.mark.sweep(3)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_legal_size_passes_the_check(name: str, num_ranks: int) -> None:
    for p, m, v in legal_sizes(name, [num_ranks], range(1, 33)):
        check(build_program(name, p, m, v))


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_that_are_written_out_are_judged_as_those_inserted(name: str) -> None:
    check(with_communication(least(name, 4, 6)))


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
    program = damaged(
        with_communication(build_program("gpipe", 2, 2)), 1, swapped("1RECV_F0", "1RECV_F1")
    )
    program = damaged(program, 1, swapped("1F0", "1F1"))
    text = faults(program)
    assert "rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1" in text
    assert "--> 0SEND_F0" in text
    assert "--> 1RECV_F1" in text


def test_ranks_that_compute_in_orders_that_need_each_other_deadlock() -> None:
    # Rank 0 wants the gradient of micro-batch 0 before it makes micro-batch 1, rank 1 both first.
    program = with_communication(
        program_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", placement=(0, 1), num_microbatches=2)
    )
    text = faults(program)
    assert "deadlock: ranks 0, 1 wait for each other" in text
    assert "--> 0B0" in text
    assert "waits for 1SEND_B0 of rank 1" in text
    assert "--> 1F1" in text
    assert "waits for 0SEND_F1 of rank 0" in text


RECEIVE_BEFORE_SEND = program_of(
    "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1",
    "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    placement=(0, 1, 2),
    num_microbatches=2,
)


def test_a_receive_in_front_of_a_send_deadlocks_where_they_share_a_queue() -> None:
    # Rank 1 sends micro-batch 0 on behind the receive of micro-batch 1, which comes after B0.
    text = faults(RECEIVE_BEFORE_SEND)
    assert "deadlock: ranks 0, 1, 2 wait for each other" in text
    assert "waits for 1SEND_F0 of rank 1" in text


def test_a_receive_in_front_of_a_send_does_no_harm_in_queues_of_their_own() -> None:
    assert find_deadlock(RECEIVE_BEFORE_SEND, queues="channel") == {}


def test_sends_may_wait_while_their_rank_goes_on() -> None:
    check(
        program_of(
            "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2",
            placement=(0, 1),
            num_microbatches=3,
        )
    )


def test_a_receive_moved_before_another_breaks_the_order_of_its_channel() -> None:
    text = faults(damaged(COMPLETE, 2, moved("2RECV_F1", before="2RECV_F0")))
    assert "same order of messages" in text


def test_channels_are_named_for_a_loop_of_two_and_for_a_v() -> None:
    loop = channels(build_program("interleaved", 2, 2, 2))
    assert loop == ((0, 1, "B"), (0, 1, "F"), (1, 0, "B"), (1, 0, "F"))
    assert channels(build_program("zb-v", 2, 3, 2)) == loop
    assert channels(build_program("interleaved", 3, 3, 2)) == (
        *((0, 1, "F"), (0, 2, "B"), (1, 0, "B"), (1, 2, "F"), (2, 0, "F"), (2, 1, "B")),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_in_one_order_of_all_ranks_may_even_block(name: str) -> None:
    for p, m, v in legal_sizes(name, (1, 2, 4, 5), (1, 3, 8, 11)):
        program = with_communication(build_program(name, p, m, v))
        assert find_deadlock(program, queues="rank", blocking=True) == {}


LATE_RECEIVES = program_of(
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    placement=(0, 1),
    num_microbatches=2,
)


def test_receives_just_before_their_compute_need_calls_that_do_not_block() -> None:
    check(LATE_RECEIVES)
    assert find_deadlock(LATE_RECEIVES, blocking=True).keys() == {0, 1}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor_ranks", [2, 3])
def test_collectives_in_every_action_add_no_deadlock(name: str, tensor_ranks: int) -> None:
    # Pipelines of one tensor group run the same rows and meet in each F, B, I and W.
    assert runs_in_lockstep(with_communication(least(name, 4, 6)), tensor_ranks)


def runs_in_lockstep(program: Program, num_copies: int) -> bool:
    """Runs copies of a pipeline, ranks in random order; True if all come to their end.

    A compute action of a rank is done only when the rank stands at it in every copy and its input
    has arrived in every copy.
    """
    rng = random.Random(0)
    ranks = [(copy, rank) for copy in range(num_copies) for rank in range(program.num_ranks)]
    at = dict.fromkeys(ranks, 0)
    sent: set[tuple[int, Action]] = set()
    while True:
        before = dict(at)
        for copy, rank in rng.sample(ranks, len(ranks)):
            row = program.actions[rank]
            while at[copy, rank] < len(row):
                action = row[at[copy, rank]]
                if action.kind in COMPUTE:
                    meet = [at[other, rank] == at[copy, rank] for other in range(num_copies)]
                    receive, _ = messages(program, action)
                    has_input = receive is None or all(
                        (other, partner(receive)) in sent for other in range(num_copies)
                    )
                    if not (all(meet) and has_input):
                        break
                    for other in range(num_copies):
                        at[other, rank] += 1
                    continue
                if action.kind in SENDS:
                    sent.add((copy, action))
                at[copy, rank] += 1
        if at == before:
            return all(at[key] == len(program.actions[key[1]]) for key in ranks)
