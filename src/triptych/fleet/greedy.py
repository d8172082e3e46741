"""Which models on which groups, one replica after the other.

`fill` is AlpaServe's fast heuristic (2302.11665, section 4.2): after each simulation the least busy
group that has room gets a replica of the model with the most unserved requests. `beam` is
its Algorithm 1: every (model, group) is tried and the best few are kept. `best_of_all` is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from triptych.errors import InputError, Problem
from triptych.fleet.judge import Judge, Verdict
from triptych.fleet.models import Fleet
from triptych.fleet.placement import Group, Placement

MOST_CASES = 200_000


def fill(placement: Placement, judge: Judge, at_once: int = 1) -> tuple[Placement, Verdict]:
    """Adds replicas until nobody misses anything or nothing fits; the best placement on the way.

    Args:
        placement: groups, with models or without.
        judge: of the requests.
        at_once: replicas between two simulations, each of another model on another group.

    """
    best, verdict = placement, judge.of(placement)
    found = verdict
    while True:
        more = _with_replicas(placement, verdict, judge.fleet, at_once)
        if more is placement:
            return best, found
        placement, verdict = more, judge.of(more)
        if verdict.attainment > found.attainment:
            best, found = placement, verdict


def _with_replicas(placement: Placement, verdict: Verdict, fleet: Fleet, at_once: int) -> Placement:
    missed = [m for m in np.argsort(-verdict.missed, kind="stable").tolist() if verdict.missed[m]]
    added = 0
    for index in np.argsort(verdict.utilisation, kind="stable").tolist():
        group = placement.groups[index]
        model = next((m for m in missed if group.takes(m, fleet)), None)
        if model is not None:
            placement = placement.put(index, group.with_model(model))
            missed.remove(model)
            added += 1
        if added == at_once:
            break
    return placement


def beam(placement: Placement, judge: Judge, width: int = 1) -> tuple[Placement, Verdict]:
    """Adds the replica that helps most, keeping the `width` best placements, while any helps."""
    kept = [(placement, judge.of(placement))]
    while True:
        best = kept[0]
        seen: dict[Placement, Verdict] = {}
        for start, _ in kept:
            for candidate in _additions(start, judge.fleet):
                if candidate not in seen:
                    seen[candidate] = judge.of(candidate)
        ranked = sorted(seen.items(), key=lambda item: -item[1].attainment)[:width]
        if not ranked or ranked[0][1].attainment <= best[1].attainment:
            return best
        kept = ranked


def _additions(placement: Placement, fleet: Fleet) -> Iterator[Placement]:
    for index, group in enumerate(placement.groups):
        if group in placement.groups[:index]:
            continue  # the same as an earlier one
        for model in range(len(fleet.models)):
            if group.takes(model, fleet):
                yield placement.put(index, group.with_model(model))


def best_of_all(placement: Placement, judge: Judge) -> tuple[Placement, Verdict]:
    """The best choice of models for these groups, by trying each.

    Raises:
        InputError: if there are too many.

    """
    choices = [list(_loads(group, judge.fleet)) for group in placement.groups]
    cases = math.prod(map(len, choices))
    if cases > MOST_CASES:
        raise InputError(Problem(f"{cases} placements", f"at most {MOST_CASES} are tried", "fill"))
    tried = (Placement(groups) for groups in itertools.product(*choices))
    return max(((p, judge.of(p)) for p in tried), key=lambda item: item[1].attainment)


def _loads(group: Group, fleet: Fleet) -> Iterator[Group]:
    """Every set of models that fits: a model less can be better, other requests wait less."""
    models = range(len(fleet.models))
    for count in range(len(models) + 1):
        for chosen in itertools.combinations(models, count):
            loaded = Group(group.shape, frozenset(chosen))
            if loaded.bytes_in(fleet) <= fleet.device_bytes:
                yield loaded
