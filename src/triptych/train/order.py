"""The order of samples: a permutation per epoch that any rank can look up at any position.

A Feistel network over the smallest even number of bits that holds the samples, walked until it
lands inside them (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sec. 3). It
needs no memory and no state: position alone says which sample comes next, so the order cannot
depend on the layout and a resumed run goes on exactly where the stopped one was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
