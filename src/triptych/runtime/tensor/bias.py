"""A row-parallel linear's bias inside a region whose partial sums are left later."""

from __future__ import annotations

import torch

from triptych.runtime.tensor.linear import Linear, product


class OneBiasLinear(Linear):
    """The first rank adds its bias, the others zero."""

    def __init__(self, linear: Linear, is_first: bool) -> None:
        super().__init__(linear, linear.deferral)
        self.share = float(is_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, part of the input width] to this rank's partial sum [N, H]."""
        assert self.bias is not None
        return product(x, self) + self.bias * self.share
