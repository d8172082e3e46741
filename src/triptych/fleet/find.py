"""The search for a placement: groups, shapes and replicas, guided by simulation.

For each way to part the models into buckets and the devices among them: groups of one shape, filled
greedily on a sample of the requests. Some of these are filled on all requests, the best two are
improved by small changes. Planned on one list of requests; whoever wants to know how good the
answer is judges it on another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from triptych.fleet.greedy import beam, best_of_all, fill
from triptych.fleet.judge import Judge
from triptych.fleet.local import Found, anneal
from triptych.fleet.models import Fleet, Shape
from triptych.fleet.partition import Bucket, alike, buckets, divisions
from triptych.fleet.placement import Placement, empty, joined
from triptych.simulate.trace import Trace

ANNEALED = 2  # finalists that small changes are tried on


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried. More of each is slower and never worse on the requests planned with.

    Args:
        sample: requests on which the kinds of groups are compared.
        finalists: of them, how many are filled on all requests; where groups have no more loads
            than `trials`, with the best of all.
        trials: small changes, of the two best finalists together.
        beam: placements kept while replicas are added to finalists, each that is possible being
            simulated; 0 adds those that are missed most.
        slack: devices that a bucket may have beside its share.
        most_buckets: models may be parted into, by latency.
        seed: of the small changes.

    """

    sample: int = 4_000
    finalists: int = 4
    trials: int = 400
    beam: int = 0
    slack: int = 2
    most_buckets: int = 3
    seed: int = 0


def find(fleet: Fleet, traces: Sequence[Trace], effort: Effort | None = None) -> Found:
    """The best placement found for these requests.

    Raises:
        InputError: if a model fits no group of these devices.

    """
    fleet.check()
    effort = effort or Effort()
    judge = Judge(fleet, traces)
    ranked = sorted(_screened(fleet, traces, effort), key=lambda found: -found.verdict.attainment)
    filled = [_filled_anew(found.placement, judge, effort) for found in ranked[: effort.finalists]]
    best = sorted(filled, key=lambda found: -found.verdict.attainment)[:ANNEALED]
    improved = [anneal(found, judge, effort.trials // len(best), effort.seed) for found in best]
    return max(improved, key=lambda found: found.verdict.attainment)


def _filled_anew(placement: Placement, judge: Judge, effort: Effort) -> Found:
    """The groups of a placement, filled on all requests."""
    bare = empty(group.shape for group in placement.groups)
    if 2 ** (len(bare.groups) * len(judge.fleet.models)) <= effort.trials:
        return Found(*best_of_all(bare, judge))
    return Found(*beam(bare, judge, effort.beam)) if effort.beam else _refilled(bare, judge)


def fixed(
    fleet: Fleet, traces: Sequence[Trace], shape: Shape, effort: Effort | None = None
) -> Found:
    """The best placement found when all groups have one shape."""
    effort = effort or Effort()
    judge = Judge(fleet, traces)
    groups = empty([shape] * (fleet.num_devices // shape.devices))
    return anneal(Found(*fill(groups, judge)), judge, effort.trials, effort.seed)


def _screened(fleet: Fleet, traces: Sequence[Trace], effort: Effort) -> Iterator[Found]:
    """Each kind of groups, filled on the sample."""
    sample = [trace.head(effort.sample // len(traces)) for trace in traces]
    judge = Judge(fleet, sample)
    asked = judge.of(Placement(())).asked
    load_s = asked * np.array([model.alone_s for model in fleet.models])

    @cache
    def best_for(bucket: Bucket, num_devices: int) -> list[Placement]:
        return _filled(bucket, num_devices, judge, keep=effort.finalists)

    for parts in buckets(fleet, effort.most_buckets):
        loads = np.array([load_s[list(bucket)].sum() for bucket in parts])
        for counts in divisions(loads, fleet.num_devices, effort.slack):
            options = [best_for(b, n) for b, n in zip(parts, counts, strict=True)]
            for rank in range(min(map(len, options))):
                placement = joined(option[rank] for option in options)
                yield Found(placement, judge.of(placement))


def _filled(bucket: Bucket, num_devices: int, judge: Judge, keep: int) -> list[Placement]:
    """The best kinds of groups for some of the models alone."""
    own = judge.narrowed(bucket)
    filled = [_refilled(groups, own) for groups in alike(judge.fleet, num_devices)]
    filled.sort(key=lambda found: -found.verdict.attainment)
    return [found.placement for found in filled[:keep]]


def _refilled(placement: Placement, judge: Judge) -> Found:
    bare = empty(group.shape for group in placement.groups)
    return Found(*fill(bare, judge, at_once=max(1, len(bare.groups) // 2)))
