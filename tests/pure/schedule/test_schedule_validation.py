"""Where a program looks back at the step before: early enough to run again, late enough to know."""

from __future__ import annotations

import pytest

from triptych.schedule.action import Kind
from triptych.schedule.generate import build_program
from triptych.schedule.messages import partner
from triptych.schedule.passes import with_communication
from triptych.schedule.traits import TRAITS
from triptych.schedule.validation import validation_points

LATE = [name for name, traits in TRAITS.items() if traits.validates_late]


def test_the_schedules_without_bubbles_look_back() -> None:
    assert LATE == ["zb-h2", "zb-v"]


@pytest.mark.parametrize("schedule", LATE)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_what_runs_ahead_is_closed_and_forwards_alone(schedule: str, ranks: int) -> None:
    traits = TRAITS[schedule]
    for count in range(traits.least_microbatches(ranks), 4 * ranks):
        program = with_communication(build_program(schedule, ranks, count, traits.least_chunks))
        points = validation_points(program)
        ahead = [row[:point] for row, point in zip(program.actions, points, strict=True)]
        actions = {action for row in ahead for action in row}
        assert {action.kind for action in actions} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
        for action in actions:
            assert action.kind is Kind.F or partner(action) in actions
            assert action.stage < program.num_stages - 1  # the loss makes gradients
        forwards = [sum(action.kind is Kind.F for action in row) for row in ahead]
        assert forwards == [min(count, ranks - 1 - rank) for rank in range(ranks)]
