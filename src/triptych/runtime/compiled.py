"""Decoder layers compiled in training, one graph for all that are alike.

A compiled function is pure, so what a layer does on the side moves to its edges. The inputs of its
linears are among its results, the gradients of their outputs among those of its backward (`Tap`);
the products for the weights' gradients are made from both outside, at once or when a zero-bubble
schedule asks for them, and go straight into the buckets. Nothing that is kept is a buffer that the
compiler may use again. Tensor-parallel collectives are operators inside (`tensor/ops.py`).

    hidden ---> norm, linears, attention, ... ---> hidden
                   | inputs of linears: kept, as autograd keeps tensors if the layer is recomputed
    taps ----------' zeros, whose gradients are those of the linears' outputs

A layer that cannot be compiled runs as it is, and a message says so. So do evaluation and rows of
packed documents, whose borders are whole numbers that change with every row.
"""

from __future__ import annotations

import inspect
import logging
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.compiled import obstacle
from triptych.plan.plan import Plan
from triptych.runtime.build.stage import StageModule
from triptych.runtime.recompute import LayerInputs
from triptych.runtime.tensor.linear import SEEN, Linear, Tap

BACKEND = "inductor"
"""What `torch.compile` hands graphs to."""

_LOG = logging.getLogger(__name__)


_FUNCTIONS: dict[Hashable, _Function] = {}
"""By kind of layer."""


class _Function:
    """The compiled forward of all layers of one kind; None once it has turned out impossible."""

    def __init__(self, name: str, forward: Callable[..., torch.Tensor]) -> None:
        self.name = name
        self._shapes: set[torch.Size] = set()
        with _compiler_warnings():
            self.run: Callable[..., Any] | None = torch.compile(
                _traced(forward),
                fullgraph=True,
                backend=BACKEND,
                options={"guard_filter_fn": _worth_checking},
            )

    def __call__(self, layer: nn.Module, hidden: torch.Tensor, args: Any, more: Any) -> Any:
        """What the traced function returns."""
        assert self.run is not None
        if hidden.shape in self._shapes:
            return self.run(layer, hidden, args, more)
        with _compiler_warnings():
            made = self.run(layer, hidden, args, more)
        self._shapes.add(hidden.shape)
        return made

    def give_up(self, error: Exception) -> None:
        """Layers of this kind run as they are from now on."""
        self.run = None
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        _LOG.warning("%s cannot be compiled and runs as it is: %s", self.name, reason)


def _traced(forward: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """What is compiled. Its code is an object of its own, by which the compiler keeps graphs."""

    def run(layer: nn.Module, hidden: torch.Tensor, args: Any, more: Any) -> Any:
        output = forward(layer, hidden, *args, **more)
        inputs: list[torch.Tensor] = []
        uses: list[tuple[int, int]] = []
        for place, x in SEEN:
            if not inputs or inputs[-1] is not x:
                inputs.append(x)
            uses.append((place, len(inputs) - 1))
        SEEN.clear()
        return output, [x.detach() for x in inputs], uses

    # The name, too: what the compiler learns of lengths it keeps by file, line and name.
    code = run.__code__.replace(co_name=f"compiled_layer_{len(_FUNCTIONS)}")
    return types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


def _worth_checking(guards: Sequence[Any]) -> list[bool]:
    """Modules and what they name never change once they are built: only inputs are looked at."""
    return [
        not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module())
        for guard in guards
    ]


class Block:
    """Runs a decoder layer in the place of its `forward`.

    Args:
        layer: with its linears, whose sinks are there.
        function: that of its kind.
        split: into how many parts the sequence is cut outside of tensor-parallel regions.
        inputs: what keeps its input, if it is recomputed.

    """

    def __init__(
        self, layer: nn.Module, function: _Function, split: int, inputs: LayerInputs | None
    ) -> None:
        self._layer, self._function = layer, function
        self._split, self._inputs = split, inputs
        self._linears = [
            module
            for module in layer.modules()
            if isinstance(module, Linear) and module.sink is not None
        ]
        self._weights = [linear.weight.detach() for linear in self._linears]
        self._widths = [linear.weight.shape[linear.transposed] for linear in self._linears]

    def __call__(self, hidden: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        """[B, s, H] to the same."""
        is_plain = more.get("cache") is None and more.get("documents") is None
        if self._function.run is None or not is_plain or not torch.is_grad_enabled():
            return self._as_it_is(hidden, *args, **more)
        try:
            if self._inputs is None:
                return self._compiled(hidden, args, more)
            made: torch.Tensor = self._inputs.run(
                partial(self._compiled, args=args, more=more), hidden
            )
            return made
        except torch._dynamo.exc.TorchDynamoException as error:
            SEEN.clear()
            self._function.give_up(error)
            return self._as_it_is(hidden, *args, **more)

    def _as_it_is(self, hidden: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        made: torch.Tensor = type(self._layer).forward(self._layer, hidden, *args, **more)
        return made

    def _compiled(self, hidden: torch.Tensor, args: Any, more: Any) -> torch.Tensor:
        call = _Call(self._linears)
        if self._linears:
            self._tap(hidden, call)
        output, call.inputs, call.uses = self._function(self._layer, hidden, args, more)
        for linear in self._linears:
            _set_tap(linear, None)  # it would hold the graph
        if self._inputs is None:
            made: torch.Tensor = output
        else:
            made = _Keep.apply(output, call, *call.inputs)  # type: ignore[no-untyped-call]
            call.inputs = ()
        return made

    def _tap(self, hidden: torch.Tensor, call: _Call) -> None:
        """Gives each linear a tap."""
        leading = hidden.shape[0], hidden.shape[1] * self._split
        shapes = [(*leading, width) for width in self._widths]
        anchor = hidden if hidden.requires_grad else self._linears[0].weight
        taps = _Taps.apply(anchor, hidden.dtype, shapes, call)  # type: ignore[no-untyped-call]
        for place, linear in enumerate(self._linears):
            _set_tap(linear, Tap(place, self._weights[place], taps[place]))


def _set_tap(linear: Linear, tap: Tap | None) -> None:
    """Without the detour of `nn.Module`, which looks for parameters in whatever is set."""
    vars(linear)["tap"] = tap


class _Call:
    """What a layer's forward leaves for its backward.

    `uses` are numbers of a linear and of its input.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears
        self.uses: Sequence[tuple[int, int]] = ()
        self.inputs: Sequence[torch.Tensor] = ()


class _Taps(torch.autograd.Function):
    """Zeros in the shapes of the linears' outputs; their gradients make those of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        dtype: torch.dtype,
        shapes: Sequence[tuple[int, ...]],
        call: _Call,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        zero = anchor.new_zeros((), dtype=dtype)
        return tuple([zero.expand(shape) for shape in shapes])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        call: _Call = ctx.call
        inputs = [x.flatten(0, -2) for x in call.inputs]
        call.inputs = ()
        for place, index in call.uses:
            grad, linear = grads[place], call.linears[place]
            if grad is None or linear.sink is None:
                continue
            factors = grad.flatten(0, -2), inputs[index]
            linear.deferral.take(linear.sink, *(factors[::-1] if linear.transposed else factors))
        return None, None, None, None


class _Keep(torch.autograd.Function):
    """Keeps inputs of linears as autograd keeps tensors: a checkpoint drops and remakes them."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, call: _Call, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.inputs = ctx.saved_tensors
        return grads[0], None, *[None] * len(ctx.call.inputs)


def compile_layers(stages: Iterable[StageModule], plan: Plan, model: Model) -> None:
    """Makes the layers of stages run compiled, in place. Buckets must hold their parameters.

    Layers of one kind share a function, hence a graph. It is made once more if lengths vary, then
    for all lengths.
    """
    refused: dict[str, list[int]] = {}
    context = max(stage.context for stage in plan.stages)
    for stage in stages:
        for index, layer in stage.layers():
            block = model.blocks[index]
            if reason := obstacle(block, drops=model.dropout, context=context):
                refused.setdefault(reason, []).append(index)
            else:
                is_repeated = plan.recompute == "full" and plan.recomputes(index)
                function = _function_of(f"layer {index}", layer, stage.tensor_number)
                inputs = stage.layer_inputs if is_repeated else None
                compiled = Block(layer, function, stage.sequence_split, inputs)
                setattr(layer, "forward", compiled)  # noqa: B010
    for reason, layers in refused.items():
        which = ", ".join(map(str, layers))
        _LOG.warning("not compiled, since %s: layers %s", reason, which)


def _function_of(name: str, layer: nn.Module, comm: int | None) -> _Function:
    """The function of a layer's kind; what it traces knows its tensor ranks by a number."""
    kind = BACKEND, comm, _kind(layer)
    if kind not in _FUNCTIONS:
        _FUNCTIONS[kind] = _Function(name, inspect.unwrap(type(layer).forward))
    return _FUNCTIONS[kind]


_OWN = frozenset({"layer_idx", "_place", "gradient_checkpointing", "_gradient_checkpointing_func"})
"""What says where a layer is, or what is done around it."""


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that one graph serves: what a trace may look at beside tensors."""
    return tuple(
        (name, type(module), _constants(module), _parameters(module))
        for name, module in layer.named_modules()
    )


def _constants(module: nn.Module) -> Hashable:
    """What a module was told; of objects that it was given the type."""
    return tuple(
        (key, value if value is None or isinstance(value, _PLAIN) else type(value))
        for key, value in sorted(vars(module).items())
        if key not in _OWN
    )


_PLAIN = (bool, int, float, str)


def _parameters(module: nn.Module) -> Hashable:
    return tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters(recurse=False)
    )


@contextmanager
def _compiler_warnings() -> Iterator[None]:
    """Mutes what the compiler itself is warned of: nobody here can change it."""
    with warnings.catch_warnings():
        for message in (
            "`torch.jit.script_method` is deprecated",  # by its import
            "The .grad attribute of a Tensor that is not a leaf",  # it asks every input for one
            "<class 'torch.autograd.function.Function'> should not be instantiated",
        ):
            warnings.filterwarnings("ignore", message)
        yield
