"""How layers are dealt to pipeline stages: evenly, or lighter where embedding and head are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from triptych.cost.pricer import EMBEDDING, HEAD, Pricer
from triptych.cost.setting import Setting
from triptych.plan.plan import even_split

_STEPS = 20


def layer_splits(pricer: Pricer, setting: Setting, parts: int) -> tuple[tuple[int, ...], ...]:
    """The splits worth pricing: the even one, and one whose slowest part is faster, if any is."""
    even = even_split(pricer.model.num_layers, parts)
    if parts in (1, pricer.model.num_layers):
        return (even,)
    layers_s = [_seconds(pricer, kind, setting) for kind in pricer.kind_of_layer]
    ends_s = _seconds(pricer, EMBEDDING, setting), _seconds(pricer, HEAD, setting)

    def slowest_s(counts: tuple[int, ...]) -> float:
        return max(part_sums(layers_s, counts, *ends_s))

    others = (quantile_split(layers_s, parts, *ends_s), balanced_split(layers_s, parts, *ends_s))
    best = min(others, key=slowest_s)
    return (even, best) if slowest_s(best) < slowest_s(even) * (1 - 1e-9) else (even,)


def part_sums(
    layers_s: Sequence[float], counts: Sequence[int], first_s: float = 0.0, last_s: float = 0.0
) -> list[float]:
    """Seconds of each part, the ends of the model included."""
    sums, start = [], 0
    for count in counts:
        sums.append(sum(layers_s[start : start + count]))
        start += count
    sums[0] += first_s
    sums[-1] += last_s
    return sums


def balanced_split(
    layers_s: Sequence[float], parts: int, first_s: float = 0.0, last_s: float = 0.0
) -> tuple[int, ...]:
    """Counts of consecutive layers whose largest sum is least; no part is empty.

    `first_s` comes on top of the first part, `last_s` of the last. By bisection over what a greedy
    deal from the back can keep to; the front, which holds most activations, gets the remainder.
    """
    prefix = [0.0, *accumulate(layers_s)]
    best = even_split(len(layers_s), parts)
    low, high = prefix[-1] / parts, max(part_sums(layers_s, best, first_s, last_s))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        counts = _deal(prefix, parts, first_s, last_s, middle)
        if counts is None:
            low = middle
        else:
            best, high = counts, max(part_sums(layers_s, counts, first_s, last_s))
    return best


def quantile_split(
    layers_s: Sequence[float], parts: int, first_s: float = 0.0, last_s: float = 0.0
) -> tuple[int, ...]:
    """Counts with each boundary as near as possible to its share of all seconds."""
    prefix = [0.0, *accumulate(layers_s)]
    share_s = (first_s + prefix[-1] + last_s) / parts
    bounds = [0]
    for part in range(1, parts):
        target = part * share_s - first_s
        at = bisect_left(prefix, target)
        if at > 0 and (at == len(prefix) or target - prefix[at - 1] < prefix[at] - target):
            at -= 1
        bounds.append(min(max(at, bounds[-1] + 1), len(layers_s) - (parts - part)))
    bounds.append(len(layers_s))
    return tuple(stop - start for start, stop in pairwise(bounds))


def _deal(
    prefix: list[float], parts: int, first_s: float, last_s: float, limit_s: float
) -> tuple[int, ...] | None:
    """Counts from the back, each part filled up to the limit; None if the limit is too low."""
    counts: list[int] = []
    left = len(prefix) - 1
    for part in reversed(range(parts)):
        extra_s = (last_s if part == parts - 1 else 0.0) + (first_s if part == 0 else 0.0)
        earliest = bisect_left(prefix, prefix[left] + extra_s - limit_s)
        start = max(earliest, part)
        if start >= left or (part == 0 and start > 0):
            return None
        counts.append(left - start)
        left = start
    return tuple(reversed(counts))


def _seconds(pricer: Pricer, kind: int, setting: Setting) -> float:
    piece = pricer.piece(kind, setting)
    return piece.forward.total_s + piece.backward.total_s
