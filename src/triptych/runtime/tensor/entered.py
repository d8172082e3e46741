"""Products of what enters a tensor-parallel region, with its communication behind their work.

    forward     gather x                       | x W^T
    backward    start gathering x, for W       | dx = dy W
                start summing dx over ranks    | dW = dy^T x
                wait for the sum

Only this rank's part of x is kept: the whole is gathered again while the input's gradient is made,
and that gradient is summed (scattered) while the weights' are. Without sequence parallelism x is
whole on every rank, so that there is nothing to gather and dx is all-reduced.

Source: Korthikanti et al. 2022, sec. 4.2.2; Narayanan et al. 2021, sec. 4.2 (asynchronous sums).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.tensor import ops

_MARK = "entered"
"""Attribute of a tensor that has entered a region."""


class Region(NamedTuple):
    """The communication at the entry of a tensor-parallel region."""

    comm: Communicator
    sequence_parallel: bool

    def start_gather(self, local: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The region's input, of this rank's part of it; under way until it is called."""
        return ops.start_gather(local, self.comm) if self.sequence_parallel else lambda: local

    def start_sum(self, grad_BSH: torch.Tensor) -> Pending:
        """The sum of the ranks' gradients of that input: this rank's part, or all of it."""
        if self.sequence_parallel:
            return ops.start_scatter(grad_BSH, self.comm)
        return self.comm.start_all_reduce(grad_BSH)


class Entered(NamedTuple):
    """What a region's input was made of: [B, s, H], or whole without sequence parallelism."""

    local: torch.Tensor
    region: Region


def mark_entered(x: torch.Tensor, entered: Entered) -> None:
    """Lets products know that a tensor has entered a region, and that they alone read it.

    Whoever else reads it all the same goes the ordinary way through autograd.
    """
    setattr(x, _MARK, entered)


def entered_of(x: torch.Tensor) -> Entered | None:
    """What a tensor was made of, if it has entered a region."""
    found: Entered | None = getattr(x, _MARK, None)
    return found
