"""When a stage's gradients are final: from there on they may be reduced over the data axis."""

from __future__ import annotations

from triptych.errors import Problem, ScheduleError
from triptych.schedule.action import Kind
from triptych.schedule.program import Program

_MAKES_WEIGHT_GRADIENTS = (Kind.B, Kind.W)


def final_gradient_action(program: Program, stage: int) -> int:
    """The index, in its rank's actions, of the stage's last full backward or W.

    After it the stage's gradients hold all micro-batches. With or without sends and receives in
    the program, which move the index. All ranks of a data group run the same row, so their
    reductions start in the same order.

    Raises ScheduleError if the stage makes no gradients.
    """
    row = program.actions[program.placement[stage]] if stage < program.num_stages else ()
    for index in range(len(row) - 1, -1, -1):
        if row[index].stage == stage and row[index].kind in _MAKES_WEIGHT_GRADIENTS:
            return index
    raise ScheduleError(
        Problem(f"stage {stage} has no backward in the program", "each stage has one B or W")
    )
