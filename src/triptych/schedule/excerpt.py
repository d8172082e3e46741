"""Part of a program as a table of ranks, with an arrow at one action of each."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.schedule.program import Program

_AROUND = 3


def excerpt(program: Program, arrows: Mapping[int, tuple[int, str]]) -> str:
    """One line for each rank in `arrows`, which maps a rank to (position, remark).

        rank 0: ... 0F1 0SEND_F1 --> 0RECV_B0  0B0 ...   waits for 1SEND_B0
        rank 1: 1RECV_F0 1F0     --> 1RECV_F2            waits for 0SEND_F2

    A position past the end of a rank's row marks its end.
    """
    lines = [
        (f"rank {rank}: ", *_around(program, rank, position), remark)
        for rank, (position, remark) in sorted(arrows.items())
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        f"{rank:<{widths[0]}}{before:<{widths[1]}} --> {at:<{widths[2]}}  {after:<{widths[3]}}"
        f"  {remark}".rstrip()
        for rank, before, at, after, remark in lines
    )


def _around(program: Program, rank: int, position: int) -> tuple[str, str, str]:
    """What stands before, at and after a position."""
    row = [str(action) for action in program.actions[rank]]
    before, after = row[:position], row[position + 1 :]
    shown_before = ["..."] * (len(before) > _AROUND) + before[-_AROUND:]
    shown_after = after[:_AROUND] + ["..."] * (len(after) > _AROUND)
    at = row[position] if position < len(row) else "(end)"
    return " ".join(shown_before), at, " ".join(shown_after)
