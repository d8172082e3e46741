"""Runs a module on tensors without memory and writes down what it calls.

Functions are seen as the module calls them (`linear`, `silu`, `layer_norm`), above autograd and
kernels. What only rearranges a tensor is not a call: its result counts as the tensor it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from triptych.capture.trace import OUTSIDE, Attended, Call, Read, Trace

TOKENS = 61
"""Of the one sequence: prime, so that no width is a multiple of it by chance."""

TOKEN_IDS = -1

REARRANGES = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "t",
        "contiguous",
        "expand",
        "expand_as",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "__getitem__",
        "narrow",
        "select",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "clone",
        "detach",
        "view_as",
        "movedim",
        "swapaxes",
        "repeat_interleave",
        "repeat",
        "__get__",
        "requires_grad_",
        "alias",
    ]
)


class Source(NamedTuple):
    """Where a tensor comes from: a call that saw the tokens, or parameters alone."""

    call: int | None
    weights: tuple[str, ...] = ()
    chosen_by: int | None = None


Frame = tuple[str, str | None, int]
"""The path of a module that is running, the norm that it is a part of, and its layer."""


class Recorder(TorchFunctionMode):
    """Writes down calls; `attend` stands behind the library's attention interface meanwhile."""

    def __init__(self, model: nn.Module, layers: Mapping[str, int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._sources: dict[int, Source] = {}
        self._rate = 0.0  # of the call under way, if it is a dropout
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._frames: list[Frame] = []
        for name, weight in model.named_parameters():
            self._sources[id(weight)] = Source(None, (name,))
        for path, module in model.named_modules():
            self._watch(path, module, layers.get(path))

    def start(self, ids: torch.Tensor) -> None:
        """Tells tokens from all other tensors."""
        self._keep(ids, Source(TOKEN_IDS))

    def _watch(self, path: str, module: nn.Module, layer: int | None) -> None:
        is_norm = "Norm" in type(module).__name__

        def enter(*_args: Any) -> None:
            _, within, current = self._frames[-1] if self._frames else ("", None, OUTSIDE)
            norm = within or (path if is_norm else None)
            self._frames.append((path, norm, current if layer is None else layer))

        def leave(*_: Any) -> None:
            self._frames.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    # --- calls -----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._rate = _dropout_rate(args, kwargs or {})
        self._note(getattr(func, "__name__", str(func)), (args, kwargs), result)
        return result

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention core [B, H, S, D] that computes nothing; its result is [B, S, H, D]."""
        if sliding_window is None:  # some say it to the mask only
            sliding_window = getattr(module, "sliding_window", None)
        attended = Attended(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            window=sliding_window if isinstance(sliding_window, int) else None,
            softcapped=bool(softcap),
            sinks=s_aux is not None,
            dropout=dropout > 0.0,
        )
        size = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        with torch._C.DisableTorchFunction():
            result = query.new_empty(size)
        self._note("attention", (query, key, value, s_aux), result)
        self.calls[-1] = replace(self.calls[-1], attended=attended)
        return result, None

    def _note(self, name: str, given: Any, result: Any) -> None:
        results = [t for t in _tensors(result)]
        if not results:
            return
        tensors = list(_tensors(given))
        found = [(t, self._sources[id(t)]) for t in tensors if id(t) in self._sources]
        if not found:
            return
        source = self._called(name, tensors, found, results[0])
        for tensor in results:
            self._keep(tensor, source)

    def _called(
        self,
        name: str,
        given: list[torch.Tensor],
        found: list[tuple[torch.Tensor, Source]],
        result: torch.Tensor,
    ) -> Source:
        seen = [(t, s) for t, s in found if s.call is not None]
        weights = tuple(dict.fromkeys(w for _, s in found for w in s.weights))
        first, rearranges = found[0][1], name in REARRANGES
        if not seen:  # made of parameters alone
            return Source(
                None,
                weights,
                next((s.chosen_by for _, s in found if s.chosen_by is not None), None),
            )
        if rearranges and first.call is None and len(seen) == 1:  # experts, by a router's choice
            return Source(None, first.weights, seen[0][1].call)
        if (rearranges and first.call is not None) or _is_factor(name, given, weights):
            return seen[0][1]
        if "dropout" in name and not self._rate:
            return seen[0][1]
        _, norm, layer = self._frames[-1] if self._frames else ("", None, OUTSIDE)
        self.calls.append(
            Call(
                function=name,
                layer=layer,
                module=self._frames[-1][0] if self._frames else "",
                norm=norm,
                reads=tuple(
                    Read(s.call, t.numel() / TOKENS) for t, s in seen if s.call is not None
                ),
                weights=weights,
                elements=result.numel() / TOKENS,
                width=result.shape[-1] if result.dim() else 1,
                chosen_by=next((s.chosen_by for _, s in found if s.chosen_by is not None), None),
            )
        )
        return Source(len(self.calls) - 1)

    def _keep(self, tensor: torch.Tensor, source: Source) -> None:
        self._sources[id(tensor)] = source
        self._kept.append(tensor)


def _is_factor(name: str, given: list[torch.Tensor], weights: tuple[str, ...]) -> bool:
    """True for a product with a number, which the kernel in front does on its way."""
    is_scaling = name.strip("_") in ("mul", "div", "rmul", "rdiv", "truediv", "imul", "itruediv")
    return is_scaling and not weights and len(given) == 1


def _dropout_rate(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The rate of a dropout, which stands behind its input; 0 for all that has no such number."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.0)
    return rate if isinstance(rate, float) else 0.0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def record(
    model: nn.Module, layers: nn.ModuleList, path: str, install: Callable[..., None]
) -> Trace:
    """The trace of a causal language model with these layers, on one short sequence.

    `install` puts an attention core behind the library's interface.
    """
    names = tuple(f"{path}.{index}" for index in range(len(layers)))
    recorder = Recorder(model, {name: index for index, name in enumerate(names)})
    install(recorder.attend)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with torch.no_grad():
        recorder.start(ids)
        with recorder:
            model(input_ids=ids, use_cache=False)
    return Trace(
        calls=tuple(recorder.calls),
        shapes=shapes,
        layers=names,
        kinds=tuple(type(layer).__name__ for layer in layers),
        tables=_tables(model),
    )


def _tables(model: Any) -> tuple[str, str]:
    """Paths of the token table and of the head's matrix; the same if they are tied."""
    paths = {id(weight): name for name, weight in model.named_parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return paths[id(embedding.weight)], paths[id(head.weight)]
