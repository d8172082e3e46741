"""What a pipeline's program needs: closed forms of its makespan, and how much is alive at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from triptych.schedule.action import Kind
from triptych.schedule.program import Program

Pair = tuple[float, float]
"""Forward and backward seconds of one stage for one micro-batch."""


def makespan_bound_s(
    schedule: str, stages: Sequence[Pair], num_microbatches: int, hop_s: float = 0.0
) -> float | None:
    """A time that no run of GPipe or 1F1B undercuts; None for other schedules.

    Exact for GPipe always, and for 1F1B with equal stages and free hops, (m+p-1)(F+B)
    (Narayanan et al. 2021, sec. 2.2).

    `stages` are in model order; `hop_s` is the time of a message from one to the next.
    """
    if schedule == "gpipe":
        return _gpipe_s(stages, num_microbatches, hop_s)
    if schedule == "1f1b":
        return one_f_one_b_s(stages, num_microbatches, hop_s)
    return None


def rank_bounds_s(
    stages: Sequence[Pair], placement: Sequence[int], num_microbatches: int, hop_s: float = 0.0
) -> list[float]:
    """For each rank, a time before which it cannot end, under any schedule.

    The way to its first stage, and its work.
    """
    work_s = [0.0] * (max(placement) + 1)
    start_s: dict[int, float] = {}
    way_s = 0.0
    for (forward_s, backward_s), rank in zip(stages, placement, strict=True):
        start_s.setdefault(rank, way_s)
        way_s += forward_s + hop_s
        work_s[rank] += num_microbatches * (forward_s + backward_s)
    return [start_s[rank] + work for rank, work in enumerate(work_s)]


def pipeline_bound_s(
    stages: Sequence[Pair],
    halves: Sequence[Pair] | None,
    placement: Sequence[int],
    num_microbatches: int,
    hop_s: float = 0.0,
) -> float:
    """A time before which rank 0 cannot end under any schedule; `halves` if backwards may be split,
    `stages` then has the shorter of a backward and its halves.

    The last stage waits for the first forward, runs all micro-batches, and its last backward goes
    the whole way back. A rank's last backward (or its input half) is that of its first stage: all
    stages of the rank come before it in the backward of the same micro-batch. It still has to
    travel back to stage 0, whose weight half then ends the step.
    """
    inputs = [backward_s for _, backward_s in stages]
    if halves:
        inputs = [min(pair[1], half[0]) for pair, half in zip(stages, halves, strict=True)]
    work_s = [0.0] * (max(placement) + 1)
    way_s: dict[int, tuple[float, float]] = {}
    forth = back = 0.0
    before = placement[0]
    for (forward_s, _), input_s, rank in zip(stages, inputs, placement, strict=True):
        sent_s = hop_s if rank != before else 0.0
        forth, back, before = forth + sent_s, back + sent_s, rank
        way_s.setdefault(rank, (forth, back))
        forth, back = forth + forward_s, back + input_s
        work_s[rank] += num_microbatches * (forward_s + input_s)
    end = len(stages) - 1
    through_s = forth + back + (num_microbatches - 1) * (stages[end][0] + inputs[end])
    last_s = max(0.0, stages[0][1] - inputs[0])
    ways = (sum(way_s[rank]) + work for rank, work in enumerate(work_s))
    return max(through_s, *ways) + last_s


def _gpipe_s(stages: Sequence[Pair], num_microbatches: int, hop_s: float) -> float:
    """Two flow shops of equal jobs, one after the other: sum + (m-1) max each."""
    forwards = [stage[0] for stage in stages]
    backwards = [stage[1] for stage in stages]
    through = sum(forwards) + sum(backwards) + 2 * (len(stages) - 1) * hop_s
    return through + (num_microbatches - 1) * (max(forwards) + max(backwards))


def one_f_one_b_s(stages: Sequence[Pair], num_microbatches: int, hop_s: float = 0.0) -> float:
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


# --- what is alive at once ---------------------------------------------------------------------


class Alive(NamedTuple):
    """Micro-batches of one stage at one moment."""

    in_flight: int  # forward done, backward (or its input half) not
    deferred: int = 0  # input half done, weight half not


Moment = tuple[Alive, ...]
"""What each stage of a rank, in model order, has alive at one moment."""


def enough_microbatches(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """How many micro-batches show the peaks of a program: more repeat what was there before."""
    is_steady = schedule != "interleaved" or num_microbatches % num_ranks == 0
    return min(num_microbatches, 4 * num_ranks) if is_steady else num_microbatches


def known_peaks(
    schedule: str, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[tuple[Moment, ...], ...] | None:
    """`program_peaks` of the simplest schedules, without their programs; None for others."""
    if schedule == "breadth-first":
        return (((Alive(num_microbatches),) * chunks,),) * num_ranks
    if schedule == "1f1b":
        return tuple(
            ((Alive(min(num_microbatches, num_ranks - rank)),),) for rank in range(num_ranks)
        )
    if schedule == "gpipe":
        return (((Alive(num_microbatches),),),) * num_ranks
    return None


@lru_cache(maxsize=4096)
def least_peaks(
    schedule: str, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[tuple[Moment, ...], ...]:
    """For each pipeline rank, a moment that its program has for certain, without the program.

    Under any schedule a whole micro-batch is in flight on all stages of a rank at some moment.
    """
    known = known_peaks(schedule, num_ranks, num_microbatches, chunks)
    if known:
        return known
    ahead = [num_ranks - rank for rank in range(num_ranks)]
    if schedule == "zb-h1":
        return tuple(((Alive(min(num_microbatches, count)),),) for count in ahead)
    if schedule in ("zb-h2", "zb-v", "dualpipe-v"):
        most = [min(num_microbatches, 2 * count - 1) for count in ahead]
        return tuple(((Alive(count), *(Alive(1),) * (chunks - 1)),) for count in most)
    rest = min(num_microbatches, num_ranks) if schedule == "interleaved" else 1
    return (((Alive(rest),) * (chunks - 1) + (Alive(1),),),) * num_ranks


def program_peaks(program: Program) -> tuple[tuple[Moment, ...], ...]:
    """For each rank, the moments at which it may hold most, whatever each stage's bytes are.

    Those that no other moment exceeds in every count.
    """
    return tuple(tuple(_peaks(program, rank)) for rank in range(program.num_ranks))


def _peaks(program: Program, rank: int) -> list[Moment]:
    place = {stage: 2 * index for index, stage in enumerate(program.stages_of(rank))}
    alive = [0] * (2 * len(place))  # in flight and deferred of each stage
    moments: dict[tuple[int, ...], None] = {}
    for action in program.actions[rank]:
        at, kind = place[action.stage], action.kind
        if kind is Kind.W:
            alive[at + 1] -= 1
            continue
        alive[at] += 1 if kind is Kind.F else -1
        if kind is Kind.I:
            alive[at + 1] += 1
        if kind is not Kind.B:
            moments[tuple(alive)] = None
    return [tuple(map(Alive, counts[::2], counts[1::2])) for counts in _largest(list(moments))]


def _largest(moments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The moments that no other one is at least as large as in every count."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(map(ge, other, moment)) for other in kept):
            kept.append(moment)
    return kept
