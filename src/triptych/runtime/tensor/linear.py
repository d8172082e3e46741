"""Our linear: its weight gradient goes straight into the bucket, at once or when it is asked for.

Autograd would make the gradient in a fresh tensor and add it to the bucket afterwards; here the
matrix product adds in place. Zero-bubble schedules run the product later (action W): the backward
then keeps its two factors in a `Deferral` (Qi et al. 2024, sec. 2.1).

The parameter is reached through the module, never through saved tensors: under recomputation those
are aliases, and what is added to an alias is lost.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


class Sink(Protocol):
    """Where a weight's gradient accumulates."""

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input, [N, K]."""

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a product that is made."""

    def arrive(self) -> None:
        """Notes that this micro-batch has given all it has to give."""


class Deferral:
    """Weight gradients that wait for their turn; `None` as the open list means: at once."""

    def __init__(self) -> None:
        self._open: list[tuple[Sink, torch.Tensor, torch.Tensor]] | None = None
        self._kept: dict[tuple[int, int], list[tuple[Sink, torch.Tensor, torch.Tensor]]] = {}

    def begin(self) -> None:
        """From now on products are kept."""
        self._open = []

    def end(self, key: tuple[int, int]) -> None:
        """Files what was kept under (stage, micro-batch)."""
        assert self._open is not None
        self._kept[key], self._open = self._open, None

    def run(self, key: tuple[int, int]) -> None:
        """Adds what was kept under a key."""
        with torch.no_grad():
            for sink, grad, inputs in self._kept.pop(key):
                sink.add_product(grad, inputs)
                sink.arrive()

    def take(self, sink: Sink, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds a product now, or keeps it."""
        if self._open is None:
            sink.add_product(grad_TN, input_TK)
            sink.arrive()
        else:
            self._open.append((sink, grad_TN, input_TK))


class Linear(nn.Module):
    """y = x W^T + b like `torch.nn.Linear`, with its gradient sink and deferral.

    A `transposed` one stores its weight as [K, N] (GPT-2).
    """

    def __init__(self, linear: nn.Linear | Conv1D | Linear, deferral: Deferral) -> None:
        super().__init__()
        self.transposed: bool
        self.transposed = (
            linear.transposed if isinstance(linear, Linear) else isinstance(linear, Conv1D)
        )
        self.weight: torch.Tensor = linear.weight
        self.bias: torch.Tensor | None = linear.bias
        self.deferral = deferral
        self.sink: Sink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        y = product(x, self)
        return y if self.bias is None else y + self.bias


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x W^T of a linear, without its bias; [..., K] to [..., N]."""
    if linear.sink is None or not torch.is_grad_enabled():
        return _apply(x, linear.weight, linear.transposed)
    y: torch.Tensor = _Product.apply(x, linear.weight, linear)  # type: ignore[no-untyped-call]
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: Linear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        return _apply(x, weight, linear.transposed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        linear: Linear = ctx.linear
        grad = grads[0]
        weight_NK = linear.weight.T if linear.transposed else linear.weight
        grad_x = grad @ weight_NK if ctx.needs_input_grad[0] else None
        assert linear.sink is not None
        factors = grad.flatten(0, -2), x.flatten(0, -2)
        linear.deferral.take(linear.sink, *(factors[::-1] if linear.transposed else factors))
        return grad_x, None, None


def _apply(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x @ weight if transposed else functional.linear(x, weight)


def replace_linears(layer: nn.Module, deferral: Deferral, recurse: bool = True) -> None:
    """Puts ours in the place of every linear of the library in a module, keeping parameters."""
    for module in list(layer.modules()) if recurse else [layer]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                module.add_module(name, Linear(child, deferral))
