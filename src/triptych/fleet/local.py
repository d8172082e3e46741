"""Better by small changes: simulated annealing over replicas.

A move adds a model to a group (in exchange for others if there is no room), drops one, or exchanges
models between two groups. Deterministic: the random numbers and the number of trials are given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from triptych.fleet.judge import Judge, Verdict
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Group, Placement

START_LOSS = 2e-4  # attainment that a move may lose with probability 1/e at first


class Found(NamedTuple):
    """A placement and how good it is."""

    placement: Placement
    verdict: Verdict


def anneal(start: Found, judge: Judge, trials: int, seed: int = 0) -> Found:
    """The best of `trials` changed placements, at least as good as the start."""
    rng = np.random.default_rng(seed)
    best = now = start
    for trial in range(trials):
        moved = _move(now.placement, judge.fleet, rng)
        if moved is None:
            continue
        found = Found(moved, judge.of(moved))
        change = found.verdict.attainment - now.verdict.attainment
        heat = START_LOSS * (1 - trial / trials)
        if change >= 0 or rng.random() < math.exp(change / heat):
            now = found
            if now.verdict.attainment > best.verdict.attainment:
                best = now
    return best


def _move(placement: Placement, fleet: Fleet, rng: np.random.Generator) -> Placement | None:
    groups = placement.groups
    here, kind = int(rng.integers(len(groups))), rng.random()
    if kind < 0.1 and groups[here].models:
        return placement.put(here, _less(groups[here], rng))
    if len(groups) == 1 or kind < 0.5:
        return _take_in(placement, here, fleet, rng)
    there = int(rng.integers(len(groups) - 1))
    return _exchange(placement, here, there + (there >= here), fleet, rng)


def _take_in(
    placement: Placement, index: int, fleet: Fleet, rng: np.random.Generator
) -> Placement | None:
    group = placement.groups[index]
    others = [m for m in range(len(fleet.models)) if m not in group.models]
    if not others:
        return None
    model = others[int(rng.integers(len(others)))]
    while group.models and not group.takes(model, fleet):
        group = _less(group, rng)
    return placement.put(index, group.with_model(model)) if group.takes(model, fleet) else None


def _less(group: Group, rng: np.random.Generator) -> Group:
    held = sorted(group.models)
    return group.without(held[int(rng.integers(len(held)))])


def _exchange(
    placement: Placement, here: int, there: int, fleet: Fleet, rng: np.random.Generator
) -> Placement | None:
    one, other = placement.groups[here], placement.groups[there]
    mine, theirs = sorted(one.models - other.models), sorted(other.models - one.models)
    if not mine or not theirs:
        return None
    out, into = mine[int(rng.integers(len(mine)))], theirs[int(rng.integers(len(theirs)))]
    one, other = one.without(out), other.without(into)
    if not (one.takes(into, fleet) and other.takes(out, fleet)):
        return None
    return placement.put(here, one.with_model(into)).put(there, other.with_model(out))
