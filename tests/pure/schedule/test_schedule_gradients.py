"""Reductions start after the last gradient of a stage, and not later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_samples import least

from triptych.errors import ScheduleError
from triptych.schedule.action import Kind
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.gradients import final_gradient_action
from triptych.schedule.passes import with_communication


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_gradient_of_the_stage_comes_after_it_and_all_come_before(name: str) -> None:
    for program in (least(name, 4, 9), with_communication(least(name, 4, 9))):
        for stage, rank in enumerate(program.placement):
            final = final_gradient_action(program, stage)
            made = [
                index
                for index, action in enumerate(program.actions[rank])
                if action.stage == stage and action.kind in (Kind.B, Kind.W)
            ]
            assert len(made) == program.num_microbatches
            assert final == max(made)


def test_the_last_chunk_of_a_breadth_first_rank_is_final_first() -> None:
    program = build_program("breadth-first", 2, 3, 2)
    assert str(program.actions[0][final_gradient_action(program, 2)]) == "2B0"
    assert final_gradient_action(program, 2) == 8
    assert final_gradient_action(program, 0) == 11


def test_an_input_gradient_alone_is_not_final() -> None:
    program = build_program("zb-h1", 2, 2)
    assert str(program.actions[1][final_gradient_action(program, 1)]) == "1W1"


def test_a_program_of_forwards_has_no_gradients() -> None:
    program = build_program("1f1b", 2, 2)
    forwards = tuple(tuple(a for a in row if a.kind is Kind.F) for row in program.actions)
    with pytest.raises(ScheduleError, match="stage 1 has no backward"):
        final_gradient_action(replace(program, actions=forwards), 1)
