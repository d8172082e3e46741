"""What an expert does between its products: activation(gate) x up, or GPT-OSS's clamped form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the outputs of gate and up, [N, I] each, to the input of down."""


def gate_of(fused: Any) -> Gate:
    """That of the library's experts."""
    if hasattr(fused, "limit"):
        return partial(_clamped, alpha=float(fused.alpha), limit=float(fused.limit))
    return partial(_plain, activation=fused.act_fn)


def _plain(gate: torch.Tensor, up: torch.Tensor, activation: Any) -> torch.Tensor:
    inner: torch.Tensor = activation(gate) * up
    return inner


def _clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    inner: torch.Tensor = _Clamped.apply(gate, up, alpha, limit)  # type: ignore[no-untyped-call]
    return inner


class _Clamped(torch.autograd.Function):
    """(clamp(up) + 1) x g sigmoid(alpha g), g = min(gate, limit); keeps its inputs and no more."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        low = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (low * torch.sigmoid(low * alpha))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gate, up), alpha, limit = ctx.saved_tensors, ctx.alpha, ctx.limit
        low, raised = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        sigmoid = torch.sigmoid(low * alpha)
        slope = sigmoid * (1 + alpha * low * (1 - sigmoid))
        grad_gate = (grads[0] * raised * slope).masked_fill(gate > limit, 0.0)
        grad_up = (grads[0] * (low * sigmoid)).masked_fill(up.abs() > limit, 0.0)
        return grad_gate, grad_up, None, None
