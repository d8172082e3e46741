"""Schedules by name: pure functions from sizes to programs of compute actions.

Sends and receives are inserted afterwards, by `passes.with_communication`. What each schedule asks
for is in `traits`.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.errors import Problem, ScheduleError
from triptych.schedule import automatic, dualpipe, flush, looped, zero_bubble
from triptych.schedule.action import Action
from triptych.schedule.automatic import Durations, Memory
from triptych.schedule.program import Program
from triptych.schedule.traits import SCHEDULES, TRAITS, broken_rules

__all__ = ["SCHEDULES", "Durations", "Memory", "build_program", "zero_bubble_program"]

Rows = list[list[Action]]

_GENERATORS: dict[str, Callable[[int, int, int], Rows]] = {
    "gpipe": lambda ranks, count, _: flush.gpipe(ranks, count),
    "1f1b": lambda ranks, count, _: flush.one_f_one_b(ranks, count),
    "interleaved": looped.interleaved,
    "breadth-first": looped.breadth_first,
    "zb-h1": lambda ranks, count, _: zero_bubble.zb_h1(ranks, count),
    "zb-h2": lambda ranks, count, _: zero_bubble.zb_h2(ranks, count),
    "zb-v": lambda ranks, count, _: zero_bubble.zb_v(ranks, count),
    "dualpipe-v": lambda ranks, count, _: dualpipe.dualpipe_v(ranks, count),
    "zb-auto": lambda ranks, count, _: automatic.zb_auto(ranks, count),
}


def build_program(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> Program:
    """The program of a schedule, without sends and receives.

    Args: num_ranks, num_microbatches, chunks (stages a rank runs) >= 1. `zb-auto` is made for
    F = I = W and at most 2p micro-batches on a rank; `zero_bubble_program` takes others.
    Raises ScheduleError with every broken rule: unknown name, sizes below 1, chunks that the
    schedule does not have, too few micro-batches.
    """
    if problems := list(broken_rules(name, num_ranks, num_microbatches, chunks)):
        raise ScheduleError(problems)
    rows = _GENERATORS[name](num_ranks, num_microbatches, chunks)
    return _program(name, rows, num_microbatches, chunks)


def zero_bubble_program(
    num_ranks: int,
    num_microbatches: int,
    *,
    memory: Memory | None = None,
    durations: Durations | None = None,
) -> Program:
    """The automatic zero-bubble program for given seconds and memory.

    Args: memory: what each rank may hold (absent: 2p micro-batches from F to W); durations: of
    F, I, W and of a message (absent: 1, 1, 1, 0).
    Raises ScheduleError for sizes below 1, and for less memory than one micro-batch.
    """
    problems = list(broken_rules("zb-auto", num_ranks, num_microbatches, 1))
    if memory is not None and memory.microbatches < 1:
        what = f"memory for {memory.microbatches:g} micro-batches"
        rule = "each rank holds at least one micro-batch from F to W"
        problems.append(Problem(what, rule, f"1 or more; 1f1b holds {num_ranks}"))
    if problems:
        raise ScheduleError(problems)
    rows = automatic.zb_auto(num_ranks, num_microbatches, memory=memory, durations=durations)
    return _program("zb-auto", rows, num_microbatches, 1)


def _program(name: str, rows: Rows, num_microbatches: int, chunks: int) -> Program:
    return Program(
        name=name,
        placement=TRAITS[name].ranks_of_stages(len(rows), chunks),
        num_microbatches=num_microbatches,
        actions=tuple(tuple(row) for row in rows),
    )
