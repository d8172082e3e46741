"""What was measured on a device and on a link, as seconds by size or shape.

A device that was measured is priced from these; others from the rates of their sheets. Between
measured points seconds run straight over sizes, and rates of products straight over the logarithms
of their three dimensions; beyond the last point they go on as between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds by size, sizes ascending."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Seconds of a size, never less than nothing; below the first point those of the first."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        above = min(bisect_right(sizes, size), len(sizes) - 1)
        slope = (seconds[above] - seconds[above - 1]) / (sizes[above] - sizes[above - 1])
        return max(0.0, seconds[above - 1] + (size - sizes[above - 1]) * slope)

    def above_least(self, size: float) -> float:
        """Seconds of a size beyond those of the smallest: without what every call costs."""
        return max(0.0, self.at(size) - self.seconds[0])

    def times(self, factor: float) -> Curve:
        """The curve of something so many times slower."""
        return replace(self, seconds=tuple(factor * value for value in self.seconds))

    def stretched(self, factor: float, later_s: float = 0.0) -> Curve:
        """The curve whose size is `factor` times as large at the same seconds, and `later_s`."""
        return Curve(
            sizes=tuple(factor * size for size in self.sizes),
            seconds=tuple(max(0.0, value + later_s) for value in self.seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """FLOP/s on a grid of whole dimensions, first dimension slowest; beyond its ends the ends'."""

    axes: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]

    def at(self, *place: float) -> float:
        """FLOP/s at a place, from the corners around it."""
        corners = [(0, 1.0)]  # index into the rates, weight
        for axis, value in zip(self.axes, place, strict=True):
            low, share = _between(axis, value)
            ends = ((low, 1.0 - share), (low + 1, share)) if share else ((low, 1.0),)
            corners = [(i * len(axis) + end, w * s) for i, w in corners for end, s in ends]
        return math.exp(sum(w * math.log(self.rates[i]) for i, w in corners))

    def times(self, factor: float) -> Grid:
        """The grid of something that takes so many times longer."""
        return replace(self, rates=tuple(rate / factor for rate in self.rates))


def _between(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The last point of an axis at or below a value, and how far the value is to the next one."""
    if value <= axis[0] or len(axis) == 1:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    low = bisect_right(axis, value) - 1
    return low, math.log(value / axis[low]) / math.log(axis[low + 1] / axis[low])


Pair = tuple[Curve, Curve]
"""Forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one dtype, all ranks of a node at work at once.

    `products` by rows, inner dimension and columns; `attention`, forward and backward, by tokens of
    a causal sequence and size of a head, in FLOP/s of the triangle's two products (both directions
    alike: 4 x heads x size x length / 2 a token); `operators` by kind and by the elements that one
    fused kernel would move, `loss` by logits.
    """

    products: Grid
    attention: tuple[Grid, Grid]
    operators: Mapping[str, Pair]

    def times(self, products: float, operators: float) -> Kernels:
        """The same, products (attention too) and operators so many times slower."""
        forward, backward = self.attention
        return Kernels(
            products=self.products.times(products),
            attention=(forward.times(products), backward.times(products)),
            operators={
                name: (a.times(operators), b.times(operators))
                for name, (a, b) in self.operators.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A device that was measured. `host_s` is what the host needs for a kernel besides its work,
    in a forward and in a backward; `optimizer` is by updated elements, in fp32.
    """

    threads: int
    host_s: tuple[float, float]
    optimizer: Curve
    kernels: Mapping[str, Kernels] = field(default_factory=dict)  # by dtype

    def times(self, products: float, operators: float) -> Measured:
        """The same device when products and memory-bound operators are so many times slower."""
        forward_s, backward_s = self.host_s
        return replace(
            self,
            host_s=(forward_s * products, backward_s * products),
            optimizer=self.optimizer.times(operators),
            kernels={d: k.times(products, operators) for d, k in self.kernels.items()},
        )


Messages = Mapping[str, Mapping[int, Curve]]
"""Of a link: seconds by bytes of `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` (the
whole tensor) and `send`, for so many ranks."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def slower(messages: Messages, factor: float) -> Messages:
    """The messages of a link that is so many times slower."""
    return {
        name: {ranks: curve.times(factor) for ranks, curve in curves.items()}
        for name, curves in messages.items()
    }


def messages_of(messages: Messages, ranks: int, latency_s: float) -> Mapping[str, Curve]:
    """The curves for a group of `ranks`: those measured with as many, else with the nearest
    number, at which a rank sends as much and a ring has other steps.
    """
    found = {}
    for name, curves in messages.items():
        near = min(curves, key=lambda n: (abs(math.log(n / ranks)), n))
        curve = curves[near]
        if near != ranks and name != "send":
            sent = (near - 1) / near / ((ranks - 1) / ranks)
            steps = (2 if name == "all_reduce" else 1) * (ranks - near)
            curve = curve.stretched(sent, steps * latency_s)
        found[name] = curve
    return found
