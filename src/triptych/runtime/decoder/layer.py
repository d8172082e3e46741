"""A decoder layer of the plain kind, its forward and its backward as plain code.

    x --- norm -- q k v -- attention -- o --- + --- norm -- gate up -- silu x -- down --- + ---
      '---------------------------------------'  '----------------------------------------'

Both halves have one form; what stands between their products differs. A half leaves its tensors on
a tape, and its backward takes them from there. Autograd sees one node a layer; weights' gradients
go from the products into the buckets. What the node keeps is what a compiled layer keeps.

Shapes: B batch, S sequence, H hidden, T = B x S tokens, N and M what products make and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from triptych.runtime.context.tiles import Documents
from triptych.runtime.decoder.norm import Norm
from triptych.runtime.decoder.products import Products
from triptych.runtime.decoder.tape import Call, NoTape, Tape
from triptych.runtime.recompute import LayerInputs


class Core(Protocol):
    """What stands between the products of a half: attention or a gate."""

    @property
    def trains(self) -> bool:
        """True if something of it does."""

    def forward(self, made_TN: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, N] to [T, M]."""

    def backward(self, grad_TM: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, M] to [T, N]."""


class Half(NamedTuple):
    """x + factor * out(core(into(norm(x))))."""

    norm: Norm
    into: Products
    core: Core
    out: Products
    factor: float

    @property
    def trains(self) -> bool:
        """True if something of it does."""
        return any(part.trains for part in (self.norm, self.into, self.core, self.out))

    def inside(self, x_TH: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, H] to what the last product reads, [T, M]: all that a backward needs is on tape."""
        normed = self.norm.forward(x_TH, tape)
        tape.keep(normed)
        read = self.core.forward(self.into.forward(normed), call, tape)
        tape.keep(read)
        return read

    def forward(self, x_TH: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[T, H] to the same."""
        return self.out.forward_onto(x_TH, self.inside(x_TH, call, tape), self.factor)

    def backward(self, grad_TH: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """The gradient of x."""
        grad = grad_TH if self.factor == 1.0 else grad_TH * self.factor
        self.out.bias_gradient(grad)
        read = tape.take()
        inner = self.core.backward(self.out.input_gradient(grad), call, tape)
        self.out.weight_gradient(grad, read)
        self.into.bias_gradient(inner)
        normed = tape.take()
        outer = self.into.input_gradient(inner)
        self.into.weight_gradient(inner, normed)
        return self.norm.backward(outer, tape, grad_TH)


class DecoderLayer:
    """Runs in the place of the `forward` of the library's layer.

    Args:
        layer: the library's, whose parameters these are. It runs itself with a cache, and where
            somebody has hooked a module in it.
        halves: attention, MLP.
        anchor: a weight that trains: makes autograd call the backward where the input asks for no
            gradient; None if nothing trains.
        inputs: what keeps its input, if it is recomputed.

    """

    def __init__(
        self,
        layer: torch.nn.Module,
        halves: tuple[Half, Half],
        anchor: torch.Tensor | None,
        inputs: LayerInputs | None,
    ) -> None:
        self._layer, self.halves = layer, halves
        self._hooks = [hooks for m in layer.modules() if m is not layer for hooks in _hooks_of(m)]
        self._anchor, self.inputs = anchor, inputs
        self._trains = [half.trains for half in halves]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any = None,
        documents: Documents | None = None,
        positions: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """[B, S, H] to the same."""
        if cache is not None or any(self._hooks):
            made: torch.Tensor = type(self._layer).forward(
                self._layer, hidden_states, position_embeddings=position_embeddings, cache=cache,
                documents=documents, positions=positions, **more,
            )  # fmt: skip
            return made
        call = Call(hidden_states.shape[0], position_embeddings, documents, positions)
        if not torch.is_grad_enabled():
            return self.forward(hidden_states, call, NoTape())
        anchor = None if hidden_states.requires_grad else self._anchor
        found: torch.Tensor = _Node.apply(hidden_states, anchor, self, call)  # type: ignore[no-untyped-call]
        return found

    def forward(self, x_BSH: torch.Tensor, call: Call, tape: Tape) -> torch.Tensor:
        """[B, S, H] to the same, no gradient."""
        attention, mlp = self.halves
        middle = attention.forward(x_BSH.reshape(-1, x_BSH.shape[-1]), call, tape)
        return mlp.forward(middle, call, tape).view(x_BSH.shape)

    def remember(self, x_BSH: torch.Tensor, call: Call) -> Tape:
        """The tape of a forward that runs again, but for its last product."""
        attention, mlp = self.halves
        tape = Tape()
        middle = attention.forward(x_BSH.reshape(-1, x_BSH.shape[-1]), call, tape)
        mlp.inside(middle, call, tape)
        return tape

    def backward(
        self, grad_BSH: torch.Tensor, call: Call, tape: Tape, wanted: bool
    ) -> torch.Tensor | None:
        """The gradient of the input; None if neither that nor one of the first half is `wanted`."""
        attention, mlp = self.halves
        grad = mlp.backward(grad_BSH.reshape(-1, grad_BSH.shape[-1]), call, tape)
        if not wanted and not self._trains[0]:
            return None
        return attention.backward(grad, call, tape).view(grad_BSH.shape)


def _hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Those that a call of a module runs, as they come and go."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, layer: DecoderLayer, call: Call
    ) -> torch.Tensor:
        ctx.layer, ctx.call = layer, call
        if not any(ctx.needs_input_grad):
            return layer.forward(x, call, NoTape())
        if layer.inputs is not None:
            ctx.kept = layer.inputs.keep(x)
            kept: Sequence[torch.Tensor] = (x,) if ctx.kept is None else ()
            ctx.save_for_backward(*kept)
            return layer.forward(x, call, NoTape())
        tape = Tape()
        made = layer.forward(x, call, tape)
        ctx.save_for_backward(*tape.tensors)
        ctx.graphs = tape.graphs
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        layer: DecoderLayer = ctx.layer
        if layer.inputs is None:
            tape = Tape(ctx.saved_tensors, ctx.graphs)
        else:
            x = ctx.saved_tensors[0] if ctx.kept is None else layer.inputs.restore(ctx.kept)
            tape = layer.remember(x, ctx.call)
        made = layer.backward(grads[0], ctx.call, tape, ctx.needs_input_grad[0])
        return made if ctx.needs_input_grad[0] else None, None, None, None
