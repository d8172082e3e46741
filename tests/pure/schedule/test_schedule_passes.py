"""Sends and receives come from one pass."""

from __future__ import annotations

import itertools
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from schedule_samples import least

from triptych.schedule.action import COMPUTE, SENDS, Action
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.messages import partner
from triptych.schedule.passes import has_communication, with_communication, without_communication
from triptych.schedule.program import Program


def rows(program: Program) -> list[str]:
    return [" ".join(map(str, row)) for row in program.actions]


def test_sends_stand_just_after_their_compute_and_receives_where_the_message_is_sent() -> None:
    assert rows(with_communication(build_program("1f1b", 2, 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_stand_in_one_order_on_all_ranks(name: str) -> None:
    # A message precedes another on some rank; none of the cycles that could be made of that exists.
    program = with_communication(least(name, 4, 9))
    follows: dict[Action, set[Action]] = {}
    for row in program.actions:
        sent = [a if a.kind in SENDS else partner(a) for a in row if a.kind not in COMPUTE]
        for before, after in itertools.pairwise(sent):
            follows.setdefault(after, set()).add(before)
    assert len(tuple(TopologicalSorter(follows).static_order())) > 0


def test_a_program_that_never_ends_gets_its_messages_all_the_same() -> None:
    program = build_program("1f1b", 2, 1)
    backwards = replace(program, actions=(program.actions[0][::-1], program.actions[1]))
    assert rows(with_communication(backwards))[0] == "0RECV_B0 0B0 0F0 0SEND_F0"


def test_a_middle_rank_talks_to_both_sides() -> None:
    middle = rows(with_communication(build_program("1f1b", 3, 1)))[1]
    assert middle == "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0"


def test_one_rank_needs_no_message() -> None:
    program = build_program("1f1b", 1, 4)
    assert with_communication(program) == program


def test_stages_on_the_same_rank_hand_over_without_a_message() -> None:
    program = Program(
        name="v",
        placement=(0, 1, 1, 0),
        num_microbatches=1,
        actions=(
            tuple(map(Action.parse, ["0F0", "3F0", "3B0", "0B0"])),
            tuple(map(Action.parse, ["1F0", "2F0", "2B0", "1B0"])),
        ),
    )
    assert rows(with_communication(program)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


def test_the_input_gradient_half_carries_the_message() -> None:
    program = build_program("1f1b", 2, 1)
    split = replace(
        program,
        actions=(program.actions[0], tuple(map(Action.parse, ("1F0", "1I0", "1W0")))),
    )
    assert rows(with_communication(split))[1] == "1RECV_F0 1F0 1I0 1SEND_B0 1W0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pass_can_be_undone_and_repeated(name: str) -> None:
    bare = least(name, 4, 6)
    complete = with_communication(bare)
    assert without_communication(complete) == bare
    assert with_communication(complete) == complete
    assert has_communication(complete)
    assert not has_communication(bare)
