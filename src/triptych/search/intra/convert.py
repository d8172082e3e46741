"""What it costs that one operator writes a tensor in another layout than the next one reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from triptych.cost.kernels.collectives import Group

DIVIDED = "BSFE"


class Pass(NamedTuple):
    """Collectives of a conversion: in the forward, and of the gradient in the backward."""

    forward: str
    backward: str


def conversion(source: str, target: str) -> Pass | None:
    """What one axis does from a written to a read layout; None if that makes no sense."""
    if source == target or (source, target) in (("g", "G"), ("g", "R")):
        return Pass("", "")
    if "E" in (source, target) or source == "G" or target in "Pg":
        return None
    if source in "Rg":
        return Pass("", "all_reduce" if target == "G" else "gather")
    if source == "P":
        if target in "RG":
            return Pass("all_reduce", "all_reduce" if target == "G" else "")
        return Pass("gather", "gather")  # reduce-scatter, and all-gather of the gradient
    if target in "RG":
        return Pass("gather", "gather" if target == "G" else "")
    return Pass("all_to_all", "all_to_all")


def conversion_s(
    source: str, target: str, groups: Sequence[Group], size_bytes: float, forwards: int
) -> float:
    """Seconds of both passes over all axes; inf where an axis cannot. `forwards`: 2 if repeated.

    `size_bytes` is the whole tensor. Axes convert one after the other, in the better order; a
    tensor is meanwhile divided along the axes that divide it.
    """
    steps = [conversion(a, b) for a, b in zip(source, target, strict=True)]
    if None in steps:
        return float("inf")
    axes = [i for i, step in enumerate(steps) if step is not None and any(step)]
    orders = (axes, axes[::-1]) if len(axes) > 1 else (axes,)
    return min(
        _in_order(order, steps, source, target, groups, size_bytes, forwards) for order in orders
    )


def _in_order(
    order: Sequence[int],
    steps: Sequence[Pass | None],
    source: str,
    target: str,
    groups: Sequence[Group],
    size_bytes: float,
    forwards: int,
) -> float:
    now, seconds = list(source), 0.0
    for axis in order:
        step = steps[axis]
        assert step is not None, "impossible conversions have no order"
        here_bytes = size_bytes
        for other, letter in enumerate(now):
            if other != axis and letter in DIVIDED:
                here_bytes /= groups[other].size
        seconds += forwards * collective_s(step.forward, groups[axis], here_bytes)
        seconds += collective_s(step.backward, groups[axis], here_bytes)
        now[axis] = target[axis]
    return seconds


def collective_s(name: str, group: Group, size_bytes: float) -> float:
    """Seconds of a collective over a tensor that is `size_bytes` whole."""
    if not name:
        return 0.0
    if name == "all_reduce":
        return group.all_reduce_s(size_bytes)
    if name == "gather":
        return group.gather_s(size_bytes)
    return group.all_to_all_s(size_bytes / group.size)
