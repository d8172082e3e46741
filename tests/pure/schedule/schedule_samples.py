"""Sizes that schedules have programs for, and the durations of the worked examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import build_program
from triptych.schedule.program import Program
from triptych.schedule.traits import TRAITS


def least(name: str, num_ranks: int, num_microbatches: int) -> Program:
    """A program with as few chunks as there can be, of at least so many micro-batches."""
    traits = TRAITS[name]
    count = max(num_microbatches, traits.least_microbatches(num_ranks))
    return build_program(name, num_ranks, count, traits.least_chunks)


def legal_sizes(
    name: str, ranks: Iterable[int], counts: Iterable[int], chunks: Iterable[int] = range(1, 5)
) -> Iterator[tuple[int, int, int]]:
    """The (ranks, micro-batches, chunks) among these that a schedule has programs for."""
    for p in ranks:
        for m in counts:
            yield from ((p, m, v) for v in chunks if TRAITS[name].allows(p, m, v))


def unit(chunks: int = 1) -> Callable[[Action], float]:
    """F=1, B=2, I=W=1 for all chunks of a rank together."""
    seconds = {Kind.F: 1 / chunks, Kind.B: 2 / chunks, Kind.I: 1 / chunks, Kind.W: 1 / chunks}
    return lambda action: seconds[action.kind]
