"""Schedules by name: pure functions from sizes to programs of compute actions.

Sends and receives are inserted afterwards, by `passes.with_communication`. Order rules:
domain.md section 4 (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2021, PipeDream-flush).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.errors import Problem, ScheduleError, nearest
from triptych.schedule.action import Action, Kind
from triptych.schedule.program import Program


def gpipe(num_stages: int, num_microbatches: int) -> Program:
    """All forwards, then all backwards, the last micro-batch first; one stage a rank.

        rank 0: F0 F1 F2          B2 B1 B0
        rank 1:    F0 F1 F2    B2 B1 B0

    Bubble (p-1)(F+B); every rank keeps all m micro-batches.
    """
    rows = []
    for stage in range(num_stages):
        forwards = [Action(stage, Kind.F, index) for index in range(num_microbatches)]
        backwards = [Action(stage, Kind.B, index) for index in reversed(range(num_microbatches))]
        rows.append(forwards + backwards)
    return _one_stage_a_rank("gpipe", num_microbatches, rows)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Program:
    """After a warm-up of p-1-r forwards, rank r alternates one forward and one backward.

        rank 0: F0 F1    B0 F2 B1    B2
        rank 1:    F0 B0 F1 B1 F2 B2

    Bubble (p-1)(F+B) as in GPipe, but rank r keeps only min(m, p-r) micro-batches. Fewer
    micro-batches than stages are legal: then the warm-up holds them all.
    """
    rows = [_one_f_one_b_row(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    return _one_stage_a_rank("1f1b", num_microbatches, rows)


def _one_f_one_b_row(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_microbatches, num_stages - 1 - stage)
    row = [Action(stage, Kind.F, index) for index in range(warmup)]
    for index in range(num_microbatches - warmup):
        row.append(Action(stage, Kind.F, warmup + index))
        row.append(Action(stage, Kind.B, index))
    cooldown = range(num_microbatches - warmup, num_microbatches)
    return row + [Action(stage, Kind.B, index) for index in cooldown]


def _one_stage_a_rank(
    name: str, num_microbatches: int, rows: Sequence[Sequence[Action]]
) -> Program:
    return Program(
        name=name,
        placement=tuple(range(len(rows))),
        num_microbatches=num_microbatches,
        actions=tuple(tuple(row) for row in rows),
    )


_GENERATORS: dict[str, Callable[[int, int], Program]] = {"gpipe": gpipe, "1f1b": one_f_one_b}

SCHEDULES: tuple[str, ...] = tuple(_GENERATORS)


def build_program(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> Program:
    """The program of a schedule, without sends and receives.

    Args: num_ranks, num_microbatches >= 1; chunks: stages a rank runs.
    Raises ScheduleError with every broken rule: unknown name, sizes below 1, chunks that the
    schedule does not have.
    """
    problems = list(_broken_rules(name, num_ranks, num_microbatches, chunks))
    if problems:
        raise ScheduleError(problems)
    return _GENERATORS[name](num_ranks, num_microbatches)


def _broken_rules(
    name: str, num_ranks: int, num_microbatches: int, chunks: int
) -> Sequence[Problem]:
    problems = []
    if name not in _GENERATORS:
        close = nearest(name, SCHEDULES) or SCHEDULES
        known = "schedules are " + ", ".join(SCHEDULES)
        problems.append(Problem(f"schedule '{name}' is unknown", known, " or ".join(close)))
    for what, count in (("pipeline ranks", num_ranks), ("micro-batches", num_microbatches)):
        if count < 1:
            problems.append(Problem(f"{what}: {count}", "at least 1", "1 or more"))
    if chunks != 1:
        rule = "gpipe and 1f1b run one stage (chunk) on each pipeline rank"
        problems.append(Problem(f"chunks: {chunks}", rule, "chunks=1"))
    return problems
