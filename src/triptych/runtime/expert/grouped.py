"""One product for all experts of a rank, where there is a grouped kernel for it.

Weights stay parameters of their own: a bucket lays those of a layer at even distances, so that they
are one tensor [E, M, K] without a copy. The host need not know how many rows each expert has.

Shapes: N rows ordered by expert, E experts of this rank, K input and M output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from triptych.runtime.expert.gate import Gate
from triptych.runtime.tensor.bias import OneBiasLinear
from triptych.runtime.tensor.linear import Linear

Kernel = Callable[..., torch.Tensor]
"""As `torch.nn.functional.grouped_mm`: (rows, [E, K, M], offs=) or (columns, rows, offs=)."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """The grouped product of bf16 on CUDA; None: one expert after the other."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    found: Kernel | None = getattr(functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    return found


class GroupedExperts:
    """down(gate(gate_proj(x), up_proj(x))) of all experts at once; linears of each, in order."""

    def __init__(
        self,
        gate_proj: Sequence[Linear],
        up_proj: Sequence[Linear],
        down_proj: Sequence[Linear],
        gate: Gate,
        kernel: Kernel,
    ) -> None:
        self._gate_proj, self._up_proj, self._down_proj = (
            GroupedLinear(linears, kernel) for linears in (gate_proj, up_proj, down_proj)
        )
        self._gate = gate

    @property
    def is_possible(self) -> bool:
        """True if the weights lie at even distances."""
        groups = (self._gate_proj, self._up_proj, self._down_proj)
        return all(group.distance is not None for group in groups)

    def __call__(self, rows_NH: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
        """Rows through their experts; `count_E` of each. [N, H]."""
        ends_E = count_E.cumsum(0).to(torch.int32)
        gate, up = self._gate_proj(rows_NH, ends_E), self._up_proj(rows_NH, ends_E)
        return self._down_proj(self._gate(gate, up), ends_E)


class GroupedLinear:
    """The same linear of every expert."""

    def __init__(self, linears: Sequence[Linear], kernel: Kernel) -> None:
        self.linears, self.kernel = linears, kernel
        self.distance = _distance([linear.weight for linear in linears])

    @property
    def weight_EMK(self) -> torch.Tensor:
        """All weights: a view, of what the bucket holds now."""
        first = self.linears[0].weight.detach()
        assert self.distance is not None
        size = (len(self.linears), *first.shape)
        return first.as_strided(size, (self.distance, *first.stride()))

    def __call__(self, x_NK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Rows through their own linear, biases added; [N, M]. Rows of expert e end at ends[e]."""
        weight = self.linears[0].weight  # so that autograd comes back here
        y_NM: torch.Tensor = _Grouped.apply(x_NK, weight, self, ends_E)  # type: ignore[no-untyped-call]
        biases = [_bias(linear) for linear in self.linears if linear.bias is not None]
        if not biases:
            return y_NM
        place_N = torch.arange(len(x_NK), dtype=ends_E.dtype, device=x_NK.device)
        return y_NM + torch.stack(biases)[torch.searchsorted(ends_E, place_N, right=True)]


def _bias(linear: Linear) -> torch.Tensor:
    """What a linear adds on this rank."""
    assert linear.bias is not None
    return linear.bias * linear.share if isinstance(linear, OneBiasLinear) else linear.bias


def _distance(weights: Sequence[torch.Tensor]) -> int | None:
    """Elements from one weight to the next in their common storage, None if they are not even."""
    offsets = [int(weight.storage_offset()) for weight in weights]
    gaps = {after - before for before, after in pairwise(offsets)} or {weights[0].numel()}
    storages = {weight.untyped_storage()._cdata for weight in weights}
    shapes = {(weight.shape, weight.stride()) for weight in weights}
    return gaps.pop() if len(gaps) == len(storages) == len(shapes) == 1 else None


class _GroupSink:
    """Where the weight gradients of all experts go: into each one's own slot.

    Frozen and trained weights are never in one bucket, hence never in one group.
    """

    def __init__(self, group: GroupedLinear, ends_E: torch.Tensor) -> None:
        self._sinks = [linear.sink for linear in group.linears if linear.sink is not None]
        self._kernel, self._ends_E = group.kernel, ends_E

    def add_product(self, grad_NM: torch.Tensor, input_NK: torch.Tensor) -> None:
        """Adds grad^T x input of each expert's rows."""
        shape = (len(self._sinks), grad_NM.shape[1], input_NK.shape[1])
        if len(input_NK) == 0:
            made_EMK = grad_NM.new_zeros(shape)
        else:
            made_EMK = self._kernel(grad_NM.T, input_NK, offs=self._ends_E)
            is_idle_E = self._ends_E.diff(prepend=self._ends_E.new_zeros(1)) == 0
            made_EMK.masked_fill_(is_idle_E[:, None, None], 0.0)  # kernels may leave these as is
        for sink, made_MK in zip(self._sinks, made_EMK, strict=True):
            sink.add(made_MK)

    def arrive(self) -> None:
        """Tells every expert's bucket."""
        for sink in self._sinks:
            sink.arrive()


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NK: torch.Tensor,
        weight: torch.Tensor,
        group: GroupedLinear,
        ends_E: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_NK, ends_E)
        ctx.group = group
        weight_EMK = group.weight_EMK
        if len(x_NK) == 0:
            return x_NK.new_zeros(0, weight_EMK.shape[1])
        return group.kernel(x_NK, weight_EMK.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_NK, ends_E = ctx.saved_tensors
        group: GroupedLinear = ctx.group
        grad_NM, grad_x = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            has_rows = len(x_NK) > 0
            made = group.kernel(grad_NM, group.weight_EMK, offs=ends_E) if has_rows else None
            grad_x = torch.zeros_like(x_NK) if made is None else made
        if group.linears[0].sink is not None:
            group.linears[0].deferral.take(_GroupSink(group, ends_E), grad_NM, x_NK)
        return grad_x, None, None, None
