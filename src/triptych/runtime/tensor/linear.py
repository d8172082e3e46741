"""Our linear: its weight gradient goes straight into the bucket, at once or when it is asked for.

Autograd would make the gradient in a fresh tensor and add it to the bucket afterwards; here the
matrix product adds in place. Zero-bubble schedules run the product later (action W): the backward
then keeps its two factors in a `Deferral` (Qi et al. 2024, sec. 2.1).

The parameter is reached through the module, never through saved tensors: under recomputation those
are aliases, and what is added to an alias is lost.

A node of autograd that is written in Python costs the host more than a small product. Linears that
the library calls one after the other with the same input share one (`Fan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from triptych.runtime.comm import Pending
from triptych.runtime.tensor.entered import Region, entered_of
from triptych.runtime.tensor.packed import PackedLinear

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears of one module that the library calls in this order with the same input."""


class ProductSink(Protocol):
    """Where gradients accumulate that come as products."""

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input, [N, K]."""

    def arrive(self) -> None:
        """Notes that this micro-batch has given all it has to give."""


class Sink(ProductSink, Protocol):
    """Where a weight's gradient accumulates."""

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a product that is made."""


class Deferral:
    """Weight gradients that wait for their turn; `None` as the open list means: at once."""

    def __init__(self) -> None:
        self._open: list[tuple[ProductSink, torch.Tensor, torch.Tensor]] | None = None
        self._kept: dict[tuple[int, int], list[tuple[ProductSink, torch.Tensor, torch.Tensor]]] = {}

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

    def take(self, sink: ProductSink, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
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
        self.fan: Fan | None = None
        self.tap: Tap | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        y = product(x, self)
        return y if self.bias is None else y + self.bias


class Tap(NamedTuple):
    """What a linear of a compiled block is given.

    A compiled function has no side effects: what the weight's gradient is made of must be among its
    results. `grad` [..., N] is an input that nothing reads; its gradient is that of the linear's
    output. What the linear was called with goes to `SEEN`, with its `place` in the block. The
    `weight` is the parameter's memory, of which no gradient is asked.
    """

    place: int
    weight: torch.Tensor
    grad: torch.Tensor


SEEN: list[tuple[int, torch.Tensor]] = []
"""Inputs of the linears of the block that is being traced; empty when it has been."""


class Fan:
    """Linears of one input: the call of the first makes all outputs, the others' calls take theirs.

    A linear that is called with another input, or out of order, goes its own way.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears
        self._input: torch.Tensor | None = None
        self._outputs: dict[Linear, torch.Tensor] = {}

    def output(self, x: torch.Tensor, linear: Linear) -> torch.Tensor | None:
        """x W^T of one of the linears, if it can be had here."""
        if linear is self._linears[0] and all(one.sink is not None for one in self._linears):
            outputs = _products(x, self._linears)
            self._outputs = dict(zip(self._linears, outputs, strict=True))
            self._input = x
        elif x is not self._input:
            return None
        y = self._outputs.pop(linear, None)
        if not self._outputs:
            self._input = None
        return y


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x W^T of a linear, without its bias; [..., K] to [..., N]."""
    if torch.compiler.is_compiling():
        return _tapped_product(x, linear)
    if linear.sink is None or not torch.is_grad_enabled():
        return _apply(x, linear.weight, linear.transposed)
    if linear.fan is not None and (y := linear.fan.output(x, linear)) is not None:
        return y
    if linear.fan is not None:  # not for itself: others may read its input
        return _ordinary_products(x, (linear,))[0]
    return _products(x, (linear,))[0]


def _tapped_product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    if linear.tap is None:  # it is frozen
        return _apply(x, linear.weight, linear.transposed)
    place, weight, grad = linear.tap
    SEEN.append((place, x))
    y: torch.Tensor = _Tapped.apply(x, weight, grad, linear.transposed)  # type: ignore[no-untyped-call]
    return y


class _Tapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tap: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.transposed = transposed
        return _apply(x, weight, transposed)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        grad = grads[0]
        return grad @ (weight.T if ctx.transposed else weight), None, grad, None


def _anchor(x: torch.Tensor, linear: Linear) -> torch.Tensor | None:
    """What makes autograd call the backward where the input asks for no gradient."""
    return None if x.requires_grad else linear.weight


def _products(x: torch.Tensor, linears: Sequence[Linear]) -> tuple[torch.Tensor, ...]:
    """x W^T of each of the linears, which alone read x if it has entered a region."""
    entered = entered_of(x)
    if entered is None:
        return _ordinary_products(x, linears)
    local, region = entered
    made: tuple[torch.Tensor, ...] = _EnteredProducts.apply(  # type: ignore[no-untyped-call]
        local, _anchor(local, linears[0]), [x], region, linears
    )
    return made


def _ordinary_products(x: torch.Tensor, linears: Sequence[Linear]) -> tuple[torch.Tensor, ...]:
    made: tuple[torch.Tensor, ...] = _Products.apply(x, _anchor(x, linears[0]), linears)  # type: ignore[no-untyped-call]
    return made


class _EnteredProducts(torch.autograd.Function):
    """The same for an input that has entered a region: gradients are those of its part here."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        anchor: torch.Tensor | None,
        whole: list[torch.Tensor],  # in a list: autograd leaves it alone
        region: Region,
        linears: Sequence[Linear],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(local)
        ctx.set_materialize_grads(False)
        ctx.region, ctx.linears = region, linears
        (x,) = whole
        return tuple([_apply(x, linear.weight, linear.transposed) for linear in linears])

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        (local,) = ctx.saved_tensors
        region: Region = ctx.region
        used: list[tuple[Linear, torch.Tensor]] = [
            (linear, grad)
            for linear, grad in zip(ctx.linears, grads, strict=True)
            if grad is not None
        ]
        whole = region.start_gather(local)
        summed: Pending | None = None
        if ctx.needs_input_grad[0]:
            summed = region.start_sum(_input_gradient(used))
        input_TK = whole().flatten(0, -2)
        for linear, grad in used:
            _take(linear, grad.flatten(0, -2), input_TK)
        return None if summed is None else summed.wait(), None, None, None, None


def _input_gradient(used: Sequence[tuple[Linear, torch.Tensor]]) -> torch.Tensor:
    """The gradient [B, S, K] of an input of linears, of those of their outputs."""
    grad_TK: torch.Tensor | None = None
    for linear, grad in used:
        grad_TK = _add_product(grad_TK, grad.flatten(0, -2), _rows(linear))
    assert grad_TK is not None
    return grad_TK.view(*used[0][1].shape[:-1], -1)


class _Products(torch.autograd.Function):
    """The products of one input with the weights of some linears."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, linears: Sequence[Linear]
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.linears = linears
        return tuple([_apply(x, linear.weight, linear.transposed) for linear in linears])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        input_TK = x.flatten(0, -2)
        grad_TK: torch.Tensor | None = None
        for linear, grad in zip(ctx.linears, grads, strict=True):
            if grad is None:
                continue
            grad_TN = grad.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                grad_TK = _add_product(grad_TK, grad_TN, _rows(linear))
            _take(linear, grad_TN, input_TK)
        return None if grad_TK is None else grad_TK.view(x.shape), None, None


def _rows(linear: Linear) -> torch.Tensor:
    """A linear's weight [N, K]."""
    return linear.weight.T if linear.transposed else linear.weight


def _take(linear: Linear, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
    """Gives a weight's gradient to its sink, or to those that wait."""
    assert linear.sink is not None
    factors = (input_TK, grad_TN) if linear.transposed else (grad_TN, input_TK)
    linear.deferral.take(linear.sink, *factors)


def _add_product(
    total: torch.Tensor | None, grad_TN: torch.Tensor, weight_NK: torch.Tensor
) -> torch.Tensor:
    return grad_TN @ weight_NK if total is None else total.addmm_(grad_TN, weight_NK)


def _apply(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x @ weight if transposed else functional.linear(x, weight)


def replace_linears(layer: nn.Module, deferral: Deferral, recurse: bool = True) -> None:
    """Puts ours in the place of every linear of the library in a module, keeping parameters."""
    for module in list(layer.modules()) if recurse else [layer]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                module.add_module(name, Linear(child, deferral))
        for names in SHARED_INPUTS:
            named = [getattr(module, name, None) for name in names]
            linears = [linear for linear in named if isinstance(linear, Linear)]
            if len(linears) == len(names):
                _join(linears)
    for module in layer.modules() if recurse else ():
        if isinstance(module, PackedLinear):
            _join([part for part in module.parts if isinstance(part, Linear)])


def are_joined(linears: Sequence[Linear]) -> bool:
    """True if an input that these linears read is read by one product, or by one `Fan`."""
    return len(linears) == 1 or (
        linears[0].fan is not None and all(one.fan is linears[0].fan for one in linears)
    )


def _join(linears: Sequence[Linear]) -> None:
    fan = Fan(linears)
    for linear in linears:
        linear.fan = fan
