"""A placement of LLMs: which models on which groups, chosen by simulation.

`planned` chooses shapes too, on a priced cluster, as `triptych place` does. `replanned` keeps the
groups that a server has: replicas are added, moved, exchanged and dropped one at a time while that
answers more of the recent requests in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from triptych.fleet.llm import LlmFleet, LlmGroup
from triptych.fleet.models import Shape
from triptych.fleet.room import Room
from triptych.fleet.shared import RowCost, Seat, SharedFleet, SharedGroup
from triptych.fleet.terms import Terms
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice
from triptych.simulate.trace import Trace

Models = tuple[tuple[int, ...], ...]  # of each group
GAIN = 0.01  # of attainment that is worth a move


def shapes(num_devices: int, most_tensor: int = 8) -> list[Shape]:
    """Powers of two, few devices first."""
    powers = [1 << i for i in range(num_devices.bit_length()) if 1 << i <= num_devices]
    found = [Shape(p, t) for p in powers for t in powers if p * t <= num_devices]
    return sorted(
        (s for s in found if s.tensor <= most_tensor), key=lambda s: (s.devices, s.tensor)
    )


def planned(fleet: LlmFleet, trace: Trace) -> dict[Shape, tuple[list[LlmGroup], float]]:
    """Of each shape that can hold all models: groups dealt by tokens, and their attainment."""
    tokens = trace.prompt_tokens / 8 + trace.output_tokens  # prompts are computed side by side
    loads = np.bincount(trace.model, weights=tokens, minlength=len(fleet.models)).tolist()
    found = {}
    for shape in shapes(fleet.cluster.num_devices):
        if shape.pipeline > min(model.num_layers for model in fleet.models):
            continue
        groups = fleet.dealt(shape, loads)
        if {m for group in groups for m in group.models} == set(range(len(fleet.models))):
            found[shape] = groups, float(fleet.served(groups, trace).mean())
    return found


def replanned(
    models: Models,
    attainment: Callable[[Models], float],
    fits: Callable[[int, Sequence[int]], bool],
) -> Models:
    """Better models for the same groups, or those that were given: the best change, time and again.

    Args:
        models: of each group now.
        attainment: share of the requests that are answered in time.
        fits: whether a group has room for some models.

    """
    best, best_value = models, attainment(models)
    while True:
        tried = {each: attainment(each) for each in set(_changes(best, fits))}
        candidate = max(sorted(tried), key=tried.__getitem__, default=best)
        if tried.get(candidate, 0.0) < best_value + GAIN:
            return best
        best, best_value = candidate, tried[candidate]


def _changes(models: Models, fits: Callable[[int, Sequence[int]], bool]) -> Iterator[Models]:
    """A replica more (in place of another if there is no room), moved or less.

    No model loses its last replica.
    """
    count = Counter(model for held in models for model in held)
    for index, held in enumerate(models):
        for model in held:
            if count[model] > 1:
                yield _put(models, index, _less(held, model))
        for model in sorted(set(count) - set(held)):
            if fits(index, (*held, model)):
                yield _put(models, index, (*held, model))
            for gone in held:
                if count[gone] > 1 and fits(index, (*_less(held, gone), model)):
                    yield _put(models, index, (*_less(held, gone), model))
            for other, theirs in enumerate(models):
                if model in theirs:
                    moved = _put(models, other, _less(theirs, model))
                    if fits(index, (*held, model)):
                        yield _put(moved, index, (*held, model))
                    yield from _exchanged(moved, index, other, model, fits)


def _less(held: Sequence[int], gone: int) -> tuple[int, ...]:
    return tuple(model for model in held if model != gone)


def _exchanged(
    moved: Models,
    index: int,
    other: int,
    model: int,
    fits: Callable[[int, Sequence[int]], bool],
) -> Iterator[Models]:
    """A model comes to `index` and one of those there goes where it was."""
    for gone in moved[index]:
        here = (*_less(moved[index], gone), model)
        there = (*moved[other], gone)
        if gone not in moved[other] and fits(index, here) and fits(other, there):
            yield _put(_put(moved, index, here), other, there)


def _put(models: Models, index: int, held: Sequence[int]) -> Models:
    return (*models[:index], tuple(sorted(held)), *models[index + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """What a server has seen of late, and what it holds: all that a new placement depends on.

    Args:
        trace: the requests that came.
        terms: of each model.
        limits: of each model's schedulers.
        prices: of steps, by model and group.
        sizes: bytes of weights and of a request at its longest, by model and group.
        memory_bytes: of a device; None: no bound.
        models: of each group now.

    """

    trace: Trace
    terms: tuple[Terms, ...]
    limits: tuple[Limits, ...]
    prices: tuple[tuple[StepPrice, ...], ...]
    sizes: tuple[tuple[Room, ...], ...]
    memory_bytes: int | None
    models: Models

    def attainment(self, models: Models) -> float:
        """The share of the requests that some placement answers in time."""
        groups = []
        for group, held in enumerate(models):
            seats = []
            for model in held:
                limits, price = self.limits[model], self.prices[model][group]
                seats.append(
                    Seat(
                        model=model,
                        cost=RowCost(price, limits.stages),
                        limits=replace(limits, prefix_reuse=False),
                        price=price,
                    )
                )
            groups.append(SharedGroup(seats=tuple(seats)))
        fleet = SharedFleet(groups, dict(enumerate(self.terms)))
        records = fleet.run(self.trace)
        return sum(map(fleet.met, records)) / max(1, len(records))

    def fits(self, group: int, models: Sequence[int]) -> bool:
        """Whether a group has room for some models."""
        if self.memory_bytes is None:
            return True
        return sum(sum(self.sizes[model][group]) for model in models) <= self.memory_bytes


def moved(recent: Recent) -> Models:
    """Better models for the groups of a server, or those that it has."""
    return replanned(recent.models, recent.attainment, recent.fits)
