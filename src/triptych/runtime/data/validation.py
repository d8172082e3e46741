"""Optimizer steps that do not wait for the gradient norm, and are validated afterwards.

With a norm over all ranks before the optimizer they would all meet there, and the skew of a
pipeline without bubbles would become one. Instead (Qi et al. 2024, sec. 4):

1. Each rank starts the sum of all parts of the norm, and updates at once as if nothing were to be
   clipped. What the update changes it keeps as it was.
2. The sum is looked at in the next step, where the last rank begins (`schedule/validation.py`), or
   when anybody asks for the weights. If it asks for no clipping, nothing is left to do.
3. Otherwise each rank puts back what it kept, updates with clipped gradients (or not at all, if the
   norm is not finite), and runs again what it had run of the next step. The step after that waits
   for its norm: one clipped step often follows another.

So the result is that of a synchronous step, bit by bit, and copies of a parameter stay equal. The
paper inverts the update instead of keeping what it changes: that rounds, loses small second moments
behind a large gradient, and cannot undo an infinity. What is kept is there while few activations
are: from the end of a step to its look back, p-1 forwards later at most.

The host looks at the sum: on CUDA it waits for the step before, while forwards of this one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triptych.runtime.comm import Pending
from triptych.runtime.data.optimizer import ShardedAdamW


class _Ahead(NamedTuple):
    """An update whose norm is under way."""

    learning_rate: float
    scalars: Pending  # loss and norm of all ranks
    before: Sequence[torch.Tensor]


class LateValidation:
    """Updates ahead of the norm; `settle` makes them right."""

    def __init__(self, optimizer: ShardedAdamW) -> None:
        self._optimizer = optimizer
        self._ahead: _Ahead | None = None
        self._waits = False

    def update(self, learning_rate: float, scalars: Pending) -> None:
        """Updates as if the norm were within the limit; after a step that was not, waits for it."""
        if self._waits:
            norm = scalars.wait()[1]
            self._optimizer.step(learning_rate, norm)
            self._waits = not self._optimizer.is_within(norm)
        else:
            before = self._optimizer.step_ahead(learning_rate)
            self._ahead = _Ahead(learning_rate, scalars, before)

    def settle(self) -> bool:
        """Makes the last update the one of a synchronous step; True if weights changed.

        Collective, as far as weights are divided: every rank sees the same norm.
        """
        if self._ahead is None:
            return False
        (learning_rate, scalars, before), self._ahead = self._ahead, None
        norm = scalars.wait()[1]
        self._waits = not self._optimizer.is_within(norm)
        if self._waits:
            self._optimizer.put_back(before)
            self._optimizer.step(learning_rate, norm)
        return self._waits
