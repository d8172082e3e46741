"""Linears of one input, one behind the other: one product where their weights lie side by side.

Weights of projections that share an input (queries, keys and values; gate and up) are neighbours in
a bucket, so that a view of it is the matrix of all of them, and another one takes all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triptych.runtime.data.sinks import Sink
from triptych.runtime.tensor.linear import Deferral, ProductSink


class Matrix(NamedTuple):
    """Weights [N, K] that lie in one piece; `span` are their outputs among those of all."""

    weight_NK: torch.Tensor
    weight_KN: torch.Tensor
    span: slice
    sink: ProductSink | None


class Bias(NamedTuple):
    """A bias [n] of the outputs of `span`."""

    values: torch.Tensor
    span: slice
    sink: Sink | None


class Products:
    """y = x W^T + b of one or several linears. Input gradients and weight gradients come apart."""

    def __init__(
        self, matrices: Sequence[Matrix], biases: Sequence[Bias], deferral: Deferral
    ) -> None:
        self.matrices, self._biases, self._deferral = matrices, biases, deferral
        self.width = matrices[-1].span.stop
        self._only = matrices[0] if len(matrices) == 1 else None

    @property
    def trains(self) -> bool:
        """True if something of it does."""
        sinks = [*(matrix.sink for matrix in self.matrices), *(b.sink for b in self._biases)]
        return any(sink is not None for sink in sinks)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        if self._only is not None:
            y_TN = x_TK.mm(self._only.weight_KN)
        else:
            y_TN = x_TK.new_empty(x_TK.shape[0], self.width)
            for matrix in self.matrices:
                torch.mm(x_TK, matrix.weight_KN, out=y_TN[:, matrix.span])
        for bias in self._biases:
            y_TN[:, bias.span].add_(bias.values)
        return y_TN

    def forward_onto(
        self, residual_TN: torch.Tensor, x_TK: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """residual + factor * (x W^T + b), of a single linear."""
        assert self._only is not None
        made = torch.addmm(residual_TN, x_TK, self._only.weight_KN, alpha=factor)
        for bias in self._biases:
            made.add_(bias.values, alpha=factor)
        return made

    def input_gradient(self, grad_TN: torch.Tensor) -> torch.Tensor:
        """[T, K]."""
        if self._only is not None:
            return grad_TN.mm(self._only.weight_NK)
        first, *others = self.matrices
        made = grad_TN[:, first.span].mm(first.weight_NK)
        for matrix in others:
            made.addmm_(grad_TN[:, matrix.span], matrix.weight_NK)
        return made

    def weight_gradient(self, grad_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Gives products to their sinks, at once or when they are asked for."""
        for matrix in self.matrices:
            if matrix.sink is not None:
                part = grad_TN if self._only is not None else grad_TN[:, matrix.span]
                self._deferral.take(matrix.sink, part, x_TK)

    def bias_gradient(self, grad_TN: torch.Tensor) -> None:
        """Gives sums over tokens to their sinks."""
        for bias in self._biases:
            if bias.sink is not None:
                bias.sink.add(grad_TN[:, bias.span].sum(0))
                bias.sink.arrive()
