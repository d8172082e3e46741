"""The program of a plan as its ranks run it, made once: it is the same every step."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from triptych.plan.plan import Plan
from triptych.schedule.action import Action
from triptych.schedule.generate import build_program
from triptych.schedule.passes import with_communication
from triptych.schedule.traits import TRAITS
from triptych.schedule.validation import validation_points


class Rows(NamedTuple):
    """The actions of each pipeline rank, and after how many of them it looks at the step before."""

    rows: tuple[tuple[Action, ...], ...]
    looks_back: tuple[int, ...]


def program_of(plan: Plan, num_microbatches: int) -> Rows:
    """The rows of a plan's schedule, messages included."""
    return _made(plan.schedule, plan.pp, num_microbatches, plan.chunks)


@lru_cache(maxsize=16)  # it takes milliseconds
def _made(schedule: str, num_ranks: int, num_microbatches: int, chunks: int) -> Rows:
    program = with_communication(build_program(schedule, num_ranks, num_microbatches, chunks))
    is_late = TRAITS[schedule].validates_late
    return Rows(program.actions, validation_points(program) if is_late else (0,) * num_ranks)
