"""When each rank ends a program: `schedule.simulate` without spans, for searches.

The same rules, many times faster: an action starts when its rank is free and its input is there; a
message between ranks takes `hop_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from triptych.cost.pipeline import Pair
from triptych.cost.tape import Step, Tape

_DIGITS = 1e12
"""Waits that differ by less than this part of a micro-batch's seconds are the same."""


def rank_ends_s(
    tape: Tape,
    stages: Sequence[Pair],
    hop_s: float,
    halves: Sequence[Pair] | None = None,
) -> list[float]:
    """The end of each rank's last action.

    `halves` are the seconds of I and of W of each stage (absent: half of its backward each).
    """
    halves = halves or [(backward_s / 2.0, backward_s / 2.0) for _, backward_s in stages]
    works_s = [second for pair, half in zip(stages, halves, strict=True) for second in pair + half]
    clock = _Clock(tape, works_s, hop_s)
    clock.run(tape.before)
    clock.repeat()
    clock.run(tape.after)
    return clock.ends_s


class _Clock:
    """The time of each rank, and when what waits in each slot is there."""

    def __init__(self, tape: Tape, works_s: list[float], hop_s: float) -> None:
        self.tape, self.works_s = tape, works_s
        self.sent_s = _sent_s(tape.placement, hop_s)
        self.ends_s = [0.0] * (max(tape.placement) + 1)
        self.slots_s = [0.0] * tape.num_slots

    def run(self, steps: list[Step]) -> None:
        """Runs some steps, each as early as it can."""
        ends_s, slots_s, works_s, sent_s = self.ends_s, self.slots_s, self.works_s, self.sent_s
        for rank, work, needed, made in steps:
            now_s, at_s = ends_s[rank], slots_s[needed]
            if at_s > now_s:
                now_s = at_s
            ends_s[rank] = now_s = now_s + works_s[work]
            slots_s[made] = now_s + sent_s[work]

    def repeat(self) -> None:
        """Runs the periods: until all that waits does so as it did some periods before.

        Times after a period are maxima of sums of those before it and constants. If they are all
        later by one amount than after an earlier period, they will be so again, for ever.
        """
        tape, left = self.tape, self.tape.repeats
        digits = _DIGITS / sum(self.works_s)
        seen: dict[tuple[int, ...], tuple[int, float]] | None = {}
        while left:
            self.run(tape.period)
            left -= 1
            if seen is not None and left:
                first_s = self.ends_s[0]
                waits = tuple([round((at_s - first_s) * digits) for at_s in self._state()])
                if waits in seen:
                    then, then_s = seen[waits]
                    times, left = divmod(left, then - left)
                    self._later(times * (first_s - then_s))
                    seen = None
                else:
                    seen[waits] = left, first_s
            if left:
                self._take_over()

    def _state(self) -> Iterator[float]:
        yield from self.ends_s
        yield from [self.slots_s[slot] for slot in self.tape.sources]

    def _later(self, more_s: float) -> None:
        self.ends_s[:] = [at_s + more_s for at_s in self.ends_s]
        for slot in self.tape.sources:
            self.slots_s[slot] += more_s

    def _take_over(self) -> None:
        """What a period left waiting is what the next one finds."""
        found_s = [self.slots_s[slot] for slot in self.tape.sources]
        for slot, at_s in zip(self.tape.targets, found_s, strict=True):
            self.slots_s[slot] = at_s


def _sent_s(placement: Sequence[int], hop_s: float) -> list[float]:
    """Seconds of the message that each work of each stage sends (`Step`)."""
    hops_s = [0.0 if a == b else hop_s for a, b in pairwise(placement)]
    sent_s: list[float] = []
    for forth_s, back_s in zip([*hops_s, 0.0], [0.0, *hops_s], strict=True):
        sent_s += (forth_s, back_s, back_s, 0.0)
    return sent_s


def in_order_ends_s(
    stages: Sequence[Pair], placement: Sequence[int], num_microbatches: int, hop_s: float
) -> list[float]:
    """As `rank_ends_s` for GPipe and breadth-first, in closed form.

    All micro-batches pass a stage one after the other. If they arrive at the largest of some
    straight lines of their number, they leave at the largest of some lines: one that comes faster
    than the stage works waits for it, one that comes slower keeps its pace.
    """
    clocks_s = [0.0] * (max(placement) + 1)
    last, ends = num_microbatches - 1, len(stages) - 1
    order = [(stage, 0) for stage in range(ends + 1)] + [(ends - s, 1) for s in range(ends + 1)]
    lines = {0.0: 0.0}  # seconds from one micro-batch to the next: when the first one arrives
    before = placement[0]
    for stage, is_backward in order:
        each_s, rank = stages[stage][is_backward], placement[stage]
        if is_backward and stage == ends:
            lines = {0.0: 0.0}
        way_s = hop_s if rank != before else 0.0
        arrivals = [(pace_s, first_s + way_s) for pace_s, first_s in lines.items()]
        waits_s = [at_s for pace_s, at_s in arrivals if pace_s <= each_s]
        lines = {pace_s: at_s + each_s for pace_s, at_s in arrivals if pace_s > each_s}
        lines[each_s] = max(*waits_s, clocks_s[rank], 0.0) + each_s
        clocks_s[rank] = max(first_s + last * pace_s for pace_s, first_s in lines.items())
        before = rank
    return clocks_s
