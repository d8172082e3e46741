"""The time of one optimizer step: closed form for search, simulation of the program for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triptych.cost.clock import rank_ends_s
from triptych.cost.frame import Frame
from triptych.cost.pipeline import Pair, makespan_bound_s
from triptych.cost.storage import Storage
from triptych.cost.sync import Tail
from triptych.schedule.action import Action, Kind
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Timeline

SIMULATED_ACTIONS = 60_000
"""Programs up to this many actions are simulated whole; longer ones at fewer micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of a step and of its phases on the critical way.

    makespan (of which `pipeline_s` is due to messages) + synchronise + optimizer + gather.
    """

    makespan_s: float
    pipeline_s: float
    synchronise_s: float  # from the end of the pipeline until all gradients are global
    optimizer_s: float
    gather_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.makespan_s + self.synchronise_s + self.optimizer_s + self.gather_s


class Priced(NamedTuple):
    """What step times under one storage are made of: seconds of stages, and of ranks' tails."""

    pairs: list[Pair]
    tails: dict[int, Tail]  # by rank of `Frame.distinct`

    @classmethod
    def of(cls, frame: Frame, storage: Storage) -> Priced:
        """Prices a frame's stages and ends of step."""
        tails = {rank: frame.tail(rank, storage) for rank in frame.distinct}
        return cls(frame.pairs(storage), tails)

    @property
    def update(self) -> Tail:
        """The tail of the rank that takes longest over optimizer and gather."""
        return max(self.tails.values(), key=lambda tail: tail.optimizer_s + tail.gather_s)


def step_bound_s(frame: Frame, priced: Priced, schedule: str) -> float:
    """A time that the step does not undercut; exact for one pipeline rank."""
    makespan_s = makespan_bound_s(schedule, priced.pairs, frame.num_microbatches, frame.hop_s)
    first, update = priced.tails[0], priced.update  # the first stage ends last
    return makespan_s + first.early_s + update.optimizer_s + update.gather_s


def step_seconds(frame: Frame, priced: Priced, schedule: str) -> float:
    """The step time of `price_step`, without the rest."""
    if frame.num_ranks == 1:
        return step_bound_s(frame, priced, schedule)
    ends_s = pipeline_ends_s(frame, priced.pairs, schedule, frame.hop_s)
    update = priced.update
    return _global_gradients_s(frame, priced, ends_s) + update.optimizer_s + update.gather_s


def price_step(frame: Frame, priced: Priced, schedule: str) -> Step:
    """The step, its pipeline simulated with the very program that would run."""
    ends_s = pipeline_ends_s(frame, priced.pairs, schedule, frame.hop_s)
    makespan_s = without_hops_s = max(ends_s)
    if frame.num_ranks > 1:
        without_hops_s = max(pipeline_ends_s(frame, priced.pairs, schedule, 0.0))
    update = priced.update
    return Step(
        makespan_s=makespan_s,
        pipeline_s=max(0.0, makespan_s - without_hops_s),
        synchronise_s=_global_gradients_s(frame, priced, ends_s) - makespan_s,
        optimizer_s=update.optimizer_s,
        gather_s=update.gather_s,
    )


def predicted_timeline(frame: Frame, pairs: list[Pair], schedule: str) -> Timeline | None:
    """The spans of the program that would run; None if there are too many to be of use."""
    if not is_simulated_whole(frame):
        return None

    def duration(action: Action) -> float:
        forward_s, backward_s = pairs[action.stage]
        if action.kind is Kind.F:
            return forward_s
        return backward_s if action.kind is Kind.B else backward_s / 2.0  # half of it: I or W

    program = frame.program(schedule, frame.num_microbatches)
    return simulate(program, duration, lambda _: frame.hop_s)


def is_simulated_whole(frame: Frame) -> bool:
    """True if the program is short enough to be simulated whole."""
    return frame.num_microbatches <= _most_microbatches(frame)


def pipeline_ends_s(frame: Frame, pairs: list[Pair], schedule: str, hop_s: float) -> list[float]:
    """When each rank ends its part of the program.

    Long programs are run with fewer micro-batches and continued at their steady pace, which
    repeats after as many micro-batches as there are stages.
    """
    count, period = frame.num_microbatches, len(pairs)
    if is_simulated_whole(frame):
        return rank_ends_s(frame.program(schedule, count), pairs, hop_s)
    most = _most_microbatches(frame)
    most -= (most - count) % period  # the same place in the period as the full count
    shorter = rank_ends_s(frame.program(schedule, most - period), pairs, hop_s)
    longer = rank_ends_s(frame.program(schedule, most), pairs, hop_s)
    periods = (count - most) / period
    return [b + periods * (b - a) for a, b in zip(shorter, longer, strict=True)]


def _most_microbatches(frame: Frame) -> int:
    stages = len(frame.stages)
    return max(4 * stages, SIMULATED_ACTIONS // (2 * stages))


def _global_gradients_s(frame: Frame, priced: Priced, ends_s: list[float]) -> float:
    """When the gradients of every rank are global, given when each ends its pipeline work."""
    return max(
        end + priced.tails[kind].early_s
        for kind, end in zip(frame.kind_of_rank, ends_s, strict=True)
    )
