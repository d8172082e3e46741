"""One stage a rank, full backwards: GPipe and 1F1B.

Order rules: domain.md section 4 (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2021,
PipeDream-flush).
"""

from __future__ import annotations

from triptych.schedule.action import Action, Kind

Row = list[Action]


def gpipe(num_stages: int, num_microbatches: int) -> list[Row]:
    """All forwards, then all backwards, the last micro-batch first.

        rank 0: F0 F1 F2          B2 B1 B0
        rank 1:    F0 F1 F2    B2 B1 B0

    Bubble (p-1)(F+B); every rank keeps all m micro-batches.
    """
    rows = []
    for stage in range(num_stages):
        forwards = [Action(stage, Kind.F, index) for index in range(num_microbatches)]
        backwards = [Action(stage, Kind.B, index) for index in reversed(range(num_microbatches))]
        rows.append(forwards + backwards)
    return rows


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[Row]:
    """After a warm-up of p-1-r forwards, rank r alternates one forward and one backward.

        rank 0: F0 F1    B0 F2 B1    B2
        rank 1:    F0 B0 F1 B1 F2 B2

    Bubble (p-1)(F+B) as in GPipe, but rank r keeps only min(m, p-r) micro-batches. Fewer
    micro-batches than stages are legal: then the warm-up holds them all.
    """
    return [_one_f_one_b_row(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _one_f_one_b_row(stage: int, num_stages: int, num_microbatches: int) -> Row:
    warmup = min(num_microbatches, num_stages - 1 - stage)
    row = [Action(stage, Kind.F, index) for index in range(warmup)]
    for index in range(num_microbatches - warmup):
        row.append(Action(stage, Kind.F, warmup + index))
        row.append(Action(stage, Kind.B, index))
    cooldown = range(num_microbatches - warmup, num_microbatches)
    return row + [Action(stage, Kind.B, index) for index in cooldown]
