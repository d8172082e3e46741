"""RMSNorm and its backward, in few kernels.

Shapes: R rows, W their width.
"""

from __future__ import annotations

import torch

from triptych.runtime.data.sinks import Sink
from triptych.runtime.decoder.tape import Tape


class Norm:
    """y = x / rms(x) * weight of rows x, sums in fp32 at least.

    With n = 1 / rms(x), z = x n and g = grad * weight the gradient of the input is
    n (g - z mean(g z)), that of the weight the sum of grad * z over all rows.
    """

    def __init__(self, weight_W: torch.Tensor, sink: Sink | None, epsilon: float) -> None:
        self._weight, self._sink = weight_W, sink
        self._width = weight_W.numel()
        self._wide = torch.promote_types(weight_W.dtype, torch.float32)
        self._is_narrow = weight_W.dtype != self._wide
        self._epsilon = torch.tensor(epsilon, dtype=self._wide, device=weight_W.device)

    @property
    def trains(self) -> bool:
        """True if its weight does."""
        return self._sink is not None

    def forward(self, x_RW: torch.Tensor, tape: Tape) -> torch.Tensor:
        """[R, W] to the same."""
        size = torch.linalg.vector_norm(x_RW, 2, -1, True, dtype=self._wide)
        inverse = torch.addcmul(self._epsilon, size, size, value=1 / self._width).rsqrt_()
        tape.keep(x_RW)
        tape.keep(inverse)
        normed = x_RW * inverse
        if self._is_narrow:
            normed = normed.to(x_RW.dtype)
        return normed.mul_(self._weight)

    def backward(
        self, grad_RW: torch.Tensor, tape: Tape, residual_RW: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of the input, added to that of a residual around it."""
        inverse, x_RW = tape.take(), tape.take()
        weight = self._weight
        if self._is_narrow:
            grad_RW, weight = grad_RW.to(self._wide), weight.to(self._wide)
        normed = x_RW * inverse
        product = grad_RW * normed
        if self._sink is not None:
            self._sink.add(product.sum(0))
            self._sink.arrive()
        mean = product.mv(weight).unsqueeze(1)
        inner = (grad_RW * weight).addcmul_(normed, mean, value=-1 / self._width)
        if residual_RW is None:
            made = inner.mul_(inverse)
        else:
            made = torch.addcmul(residual_RW, inner, inverse)
        return made.to(x_RW.dtype) if self._is_narrow else made
