"""The order of samples: a permutation per epoch that any rank can look up at any position.

A Feistel network over the smallest even number of bits that holds the samples, walked until it
lands inside them (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sec. 3). It
needs no memory and no state: position alone says which sample comes next, so the order cannot
depend on the layout and a resumed run goes on exactly where the stopped one was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

_MASK = (1 << 64) - 1
_ROUNDS = 6
_LEAST_HALF_BITS = 4  # fewer would leave too few different permutations


def mix(value: int) -> int:
    """64 well-mixed bits of an integer (SplitMix64's finaliser, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample is consumed at a position; positions count on through all epochs."""

    num_samples: int
    seed: int
    _half_bits: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.num_samples > 0
        bits = (self.num_samples - 1).bit_length()
        object.__setattr__(self, "_half_bits", max(_LEAST_HALF_BITS, (bits + 1) // 2))

    def at(self, position: int) -> int:
        """The sample at a position: every sample once in each epoch."""
        epoch, place = divmod(position, self.num_samples)
        keys = self._keys(epoch)
        while True:
            place = self._permuted(place, keys)
            if place < self.num_samples:
                return place

    def take(self, positions: Iterable[int]) -> list[int]:
        """The samples at several positions."""
        return [self.at(position) for position in positions]

    def _keys(self, epoch: int) -> list[int]:
        start = mix(mix(self.seed & _MASK) ^ epoch)
        return [mix(start + i) for i in range(_ROUNDS)]

    def _permuted(self, place: int, keys: list[int]) -> int:
        half = self._half_bits
        low_mask = (1 << half) - 1
        left, right = place >> half, place & low_mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & low_mask)
        return (left << half) | right


BLOCK = 1000


class Taken(NamedTuple):
    """A sample of one of several data sets."""

    source: int
    sample: int


class MixtureOrder:
    """Which sample of which data set is consumed at a position.

    Every block of 1000 positions holds each data set in proportion to its weight, to a thousandth,
    in an order of its own; each data set goes through its samples in the order of `SampleOrder`.
    """

    def __init__(
        self, num_samples: Sequence[int | None], weights: Sequence[float], seed: int
    ) -> None:
        """None stands for a data set of unknown size that has an order of its own."""
        self._counts = block_counts(weights)
        self._orders = [
            None if n is None else SampleOrder(n, seed if i == 0 else mix(seed ^ mix(i)))
            for i, n in enumerate(num_samples)
        ]
        self._blocks = SampleOrder(BLOCK, mix(seed ^ 0x6D69780A))

        self._made: tuple[int, list[Taken]] = (-1, [])

    def at(self, position: int) -> Taken:
        """The sample at a position."""
        if len(self._orders) == 1:
            return self._taken(0, position)
        block, place = divmod(position, BLOCK)
        if self._made[0] != block:
            self._made = (block, self._block(block))
        return self._taken(*self._made[1][place])

    def _taken(self, source: int, index: int) -> Taken:
        order = self._orders[source]
        return Taken(source, index if order is None else order.at(index))

    def _block(self, block: int) -> list[Taken]:
        """The data set of each position of a block, and how many of it came before in the run."""
        borders = list(accumulate(self._counts))
        nexts = [block * count for count in self._counts]
        made = []
        for place in range(BLOCK):
            source = bisect_right(borders, self._blocks.at(block * BLOCK + place))
            made.append(Taken(source, nexts[source]))
            nexts[source] += 1
        return made


def block_counts(weights: Sequence[float]) -> list[int]:
    """How many positions of a block each weight gets: they add up, by largest remainders."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    return counts
