"""The time of one optimizer step: closed form for search, simulation of the program for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triptych.cost.clock import in_order_ends_s, rank_ends_s
from triptych.cost.frame import Frame
from triptych.cost.pipeline import Pair, makespan_bound_s, pipeline_bound_s, rank_bounds_s
from triptych.cost.storage import Storage
from triptych.cost.sync import Tail
from triptych.schedule.action import Action, Kind
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Timeline
from triptych.schedule.traits import TRAITS

SHOWN_ACTIONS = 60_000
"""Programs up to this many actions have a timeline."""

SEARCHED_ACTIONS = 6_000
"""Programs that are themselves searched for are made up to this long; longer ones continue them."""


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
    halves: list[Pair]  # I and W of each stage, where a schedule splits backwards
    tails: dict[int, Tail]  # by rank of `Frame.distinct`

    @classmethod
    def of(cls, frame: Frame, storage: Storage) -> Priced:
        """Prices a frame's stages and ends of step."""
        tails = {rank: frame.tail(rank, storage) for rank in frame.distinct}
        return cls(*frame.passes(storage), tails)

    @property
    def least(self) -> list[Pair]:
        """Forward and backward seconds of stages where backwards may be whole or in halves."""
        return [
            (forward_s, min(backward_s, sum(halves)))
            for (forward_s, backward_s), halves in zip(self.pairs, self.halves, strict=True)
        ]

    @property
    def update(self) -> Tail:
        """The tail of the rank that takes longest over optimizer and gather."""
        return max(self.tails.values(), key=lambda tail: tail.optimizer_s + tail.gather_s)


def step_bound_s(frame: Frame, priced: Priced, schedule: str) -> float:
    """A time that the step does not undercut; exact for one pipeline rank."""
    count, update = frame.num_microbatches, priced.update
    makespan_s = makespan_bound_s(schedule, priced.pairs, count, frame.hop_s)
    first_s = priced.tails[0].early_s
    if makespan_s is not None:
        gradients_s = makespan_s + first_s  # the first stage ends last
    else:
        splits = TRAITS[schedule].splits_backward
        halves = priced.halves if splits else None
        pairs = priced.least if splits else priced.pairs
        ends_s = rank_bounds_s(pairs, frame.placement, count, frame.hop_s)
        way_s = pipeline_bound_s(pairs, halves, frame.placement, count, frame.hop_s)
        gradients_s = max(_global_gradients_s(frame, priced, ends_s), way_s + first_s)
    return gradients_s + update.optimizer_s + update.gather_s


def step_seconds(frame: Frame, priced: Priced, schedule: str) -> float:
    """The step time of `price_step`, without the rest."""
    if frame.num_ranks == 1 and not TRAITS[schedule].splits_backward:
        return step_bound_s(frame, priced, schedule)
    ends_s = pipeline_ends_s(frame, priced, schedule, frame.hop_s)
    update = priced.update
    return _global_gradients_s(frame, priced, ends_s) + update.optimizer_s + update.gather_s


def price_step(frame: Frame, priced: Priced, schedule: str) -> Step:
    """The step, its pipeline simulated with the very program that would run."""
    ends_s = pipeline_ends_s(frame, priced, schedule, frame.hop_s)
    makespan_s = without_hops_s = max(ends_s)
    if frame.num_ranks > 1:
        without_hops_s = max(pipeline_ends_s(frame, priced, schedule, 0.0))
    update = priced.update
    return Step(
        makespan_s=makespan_s,
        pipeline_s=max(0.0, makespan_s - without_hops_s),
        synchronise_s=_global_gradients_s(frame, priced, ends_s) - makespan_s,
        optimizer_s=update.optimizer_s,
        gather_s=update.gather_s,
    )


def predicted_timeline(frame: Frame, priced: Priced, schedule: str) -> Timeline | None:
    """The spans of the program that would run; None if there are too many to be of use."""
    if frame.num_microbatches > _most_microbatches(frame, SHOWN_ACTIONS):
        return None

    def duration(action: Action) -> float:
        forward_s, backward_s = priced.pairs[action.stage]
        input_s, weight_s = priced.halves[action.stage]
        seconds = {Kind.F: forward_s, Kind.B: backward_s, Kind.I: input_s, Kind.W: weight_s}
        return seconds[action.kind]

    program = frame.program(schedule, frame.num_microbatches)
    return simulate(program, duration, lambda _: frame.hop_s)


def busy_s(frame: Frame, priced: Priced, schedule: str) -> float:
    """Seconds that all pipeline ranks together compute in a step."""
    count = frame.num_microbatches
    split = [0] * len(priced.pairs)
    if TRAITS[schedule].splits_backward:
        counted = count if is_exact(frame, schedule) else _most_searched(frame)
        split = frame.tape(schedule, counted).tally(Kind.W)
        split = [count if number == counted else number for number in split]
    return sum(
        count * forward_s + (count - number) * backward_s + number * sum(halves)
        for (forward_s, backward_s), halves, number in zip(
            priced.pairs, priced.halves, split, strict=True
        )
    )


def is_exact(frame: Frame, schedule: str) -> bool:
    """True if the very program is simulated, to its end."""
    return schedule != "zb-auto" or frame.num_microbatches <= _most_searched(frame)


def pipeline_ends_s(frame: Frame, priced: Priced, schedule: str, hop_s: float) -> list[float]:
    """When each rank ends its part of the program."""
    known = frame.pricer.ends_s
    shape = (schedule, frame.num_microbatches, frame.placement, hop_s)
    key = (*shape, *priced.pairs, *priced.halves)
    if key not in known:
        if is_exact(frame, schedule):
            known[key] = _ends_s(frame, priced, schedule, hop_s, frame.num_microbatches)
        else:
            known[key] = _continued_s(frame, priced, schedule, hop_s)
    return known[key]


def _ends_s(frame: Frame, priced: Priced, schedule: str, hop_s: float, count: int) -> list[float]:
    if TRAITS[schedule].runs_in_order:
        return in_order_ends_s(priced.pairs, frame.placement, count, hop_s)
    return rank_ends_s(frame.tape(schedule, count), priced.pairs, hop_s, priced.halves)


def _continued_s(frame: Frame, priced: Priced, schedule: str, hop_s: float) -> list[float]:
    """A program with fewer micro-batches, continued at its steady pace.

    That repeats after as many micro-batches as there are stages.
    """
    count, period, most = frame.num_microbatches, len(priced.pairs), _most_searched(frame)
    most -= (most - count) % period  # the same place in the period as the full count
    periods = (count - most) / period
    shorter, longer = (
        _ends_s(frame, priced, schedule, hop_s, number) for number in (most - period, most)
    )
    return [far + periods * (far - near) for near, far in zip(shorter, longer, strict=True)]


def _most_searched(frame: Frame) -> int:
    return _most_microbatches(frame, SEARCHED_ACTIONS)


def _most_microbatches(frame: Frame, actions: int) -> int:
    stages = len(frame.stages)
    return max(4 * stages, actions // (2 * stages))


def _global_gradients_s(frame: Frame, priced: Priced, ends_s: list[float]) -> float:
    """When the gradients of every rank are global, given when each ends its pipeline work."""
    return max(
        end + priced.tails[kind].early_s
        for kind, end in zip(frame.kind_of_rank, ends_s, strict=True)
    )
