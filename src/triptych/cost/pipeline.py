"""Closed forms of a pipeline's makespan, from the seconds of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.schedule.action import Kind
from triptych.schedule.generate import build_program
from triptych.schedule.program import Program

Pair = tuple[float, float]
"""Forward and backward seconds of one stage for one micro-batch."""


def makespan_bound_s(
    schedule: str, stages: Sequence[Pair], num_microbatches: int, hop_s: float = 0.0
) -> float:
    """A time that no run of the program undercuts, one stage a rank.

    Exact for GPipe always, and for 1F1B with equal stages and free hops, (m+p-1)(F+B)
    (Narayanan et al. 2021, sec. 2.2); for other schedules a plain bound.

    `stages` are in model order; `hop_s` is the time of a message from one to the next.
    """
    if len(stages) == 1:
        return num_microbatches * (stages[0][0] + stages[0][1])
    if schedule == "gpipe":
        return _gpipe_s(stages, num_microbatches, hop_s)
    if schedule == "1f1b":
        return _one_f_one_b_s(stages, num_microbatches, hop_s)
    return max(num_microbatches * (forward + backward) for forward, backward in stages)


def _gpipe_s(stages: Sequence[Pair], num_microbatches: int, hop_s: float) -> float:
    """Two flow shops of equal jobs, one after the other: sum + (m-1) max each."""
    forwards = [stage[0] for stage in stages]
    backwards = [stage[1] for stage in stages]
    through = sum(forwards) + sum(backwards) + 2 * (len(stages) - 1) * hop_s
    return through + (num_microbatches - 1) * (max(forwards) + max(backwards))


def _one_f_one_b_s(stages: Sequence[Pair], num_microbatches: int, hop_s: float) -> float:
    """The largest over stages k of: way in and out, work of k, waits that the order forces on k.

        way in and out   sum of F+B and 2 hops over the stages before k
        first wait       F(0) of k goes to the end and comes back as B(0); meanwhile k has
                         min(m-1, p-1-k) other forwards to do
        last wait        the same for F(m-1) and B(m-1), with backwards to do meanwhile

    With few micro-batches (m <= p-k) the two waits are one.
    """
    longest, before, after = 0.0, 0.0, sum(f + b + 2 * hop_s for f, b in stages)
    for index, (forward, backward) in enumerate(stages):
        after -= forward + backward + 2 * hop_s
        others = min(num_microbatches - 1, len(stages) - 1 - index)
        first = max(0.0, after - others * forward)
        last = max(0.0, after - others * backward)
        is_apart = num_microbatches > len(stages) - index
        waits = first + last if is_apart else max(first, last)
        longest = max(longest, before + num_microbatches * (forward + backward) + waits)
        before += forward + backward + 2 * hop_s
    return longest


def in_flight(schedule: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> list[int]:
    """For each stage, the most micro-batches whose forward is done and backward is not."""
    if schedule == "1f1b" and chunks == 1:
        return [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)]
    if schedule == "gpipe":
        return [num_microbatches] * num_ranks
    return _counted_in_flight(build_program(schedule, num_ranks, num_microbatches, chunks))


def _counted_in_flight(program: Program) -> list[int]:
    live, peak = [0] * program.num_stages, [0] * program.num_stages
    change = {Kind.F: 1, Kind.B: -1, Kind.I: -1}
    for row in program.actions:
        for action in row:
            live[action.stage] += change.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], live[action.stage])
    return peak
