"""Rotary positions of queries and keys together, in place: x cos + swap(x) sin, halves swapped."""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class Rotary:
    """Turns heads [B, S, h, D] by what the library's embedding made for their positions.

    The library negates the second half after the swap; here the sine has the sign.
    """

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self._made: Pair | None = None

    def turn(self, x_BShD: torch.Tensor, pair: Pair) -> None:
        """Rotates in place."""
        cos, sin = self._signed(pair)
        swapped = _swap(x_BShD).mul_(sin)
        torch.addcmul(swapped, x_BShD, cos, out=x_BShD)

    def turn_back(self, grad_BShD: torch.Tensor, pair: Pair) -> None:
        """The gradient of what was rotated, in place."""
        cos, sin = self._signed(pair)
        swapped = _swap(grad_BShD * sin)
        torch.addcmul(swapped, grad_BShD, cos, out=grad_BShD)

    def _signed(self, pair: Pair) -> Pair:
        """Cosines and signed sines [1 or B, S, 1, D]; made once for positions that stay."""
        if pair is not self._pair or self._made is None:
            cos, sin = (x.unsqueeze(2) for x in pair)
            first, second = sin.chunk(2, -1)
            self._pair, self._made = pair, (cos, torch.cat((-first, second), -1))
        return self._made


def _swap(x_BShD: torch.Tensor) -> torch.Tensor:
    return x_BShD.roll(x_BShD.shape[-1] // 2, -1)
