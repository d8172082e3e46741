"""Muon for the matrices of the layers; everything else is AdamW's, at the same learning rate.

Momentum, made orthogonal by Newton-Schulz steps in bf16, scaled so that its root mean square is
that of an AdamW update: one rate then serves both. The arithmetic is `torch.optim.Muon`.

Source: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is scalable for LLM training", sec. 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Matrix(NamedTuple):
    """A whole matrix that this rank updates: weights, gradient and momentum, [N, K] each."""

    master: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor


def update_matrices(
    matrices: Sequence[Matrix],
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
    divisor: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """Updates weights and momentum from gradients / `divisor`; not at all if `found_inf` is 1.

    The host does not wait to know: what was is put back. Cost: a copy of both while it runs.
    """
    for matrix in matrices:
        weights = matrix.master.detach()
        weights.grad = (matrix.gradient / divisor).to(weights.dtype)
        averaged = matrix.momentum.to(weights.dtype, copy=True)
        before = weights.clone()
        optimizer = torch.optim.Muon(
            [weights],
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizer.state[weights]["momentum_buffer"] = averaged
        optimizer.step()  # type: ignore[no-untyped-call]
        is_skipped = found_inf.bool()
        weights.copy_(torch.where(is_skipped, before, weights))
        matrix.momentum.copy_(torch.where(is_skipped, matrix.momentum, averaged))
