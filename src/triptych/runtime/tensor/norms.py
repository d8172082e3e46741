"""Norms whose width is divided over the tensor ranks (OLMo 2: over all query or key heads)."""

from __future__ import annotations

import torch
from torch import nn

from triptych.model.model import Attention
from triptych.plan.layout import kv_head_range, query_head_range
from triptych.runtime.comm import Communicator
from triptych.runtime.tensor.functions import sum_over_ranks


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width of which this rank holds a part: one sum of squares travels a token.

    `elements` are those of all ranks together, heads that several ranks hold counted on each.
    """

    def __init__(self, norm: nn.Module, elements: int, comm: Communicator) -> None:
        super().__init__()
        weight, epsilon = norm.weight, norm.variance_epsilon
        assert isinstance(weight, nn.Parameter) and isinstance(epsilon, float)
        self.weight = weight
        self._epsilon = epsilon
        self._elements = elements
        self._comm = comm

    def forward(self, x_BSw: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * weight along the last dimension, this rank's part of it."""
        wide = x_BSw.to(torch.promote_types(x_BSw.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self._comm)
        normed = wide * torch.rsqrt(squares / self._elements + self._epsilon)
        return (self.weight * normed).to(x_BSw.dtype)


def split_head_norms(region: nn.Module, attention: Attention, comm: Communicator) -> None:
    """Replaces the norms over all query heads and all key heads of an attention, in place."""
    for name, held in (("q_norm", query_head_range), ("k_norm", kv_head_range)):
        ranges = [held(attention, comm.size, rank) for rank in range(comm.size)]
        elements = attention.head_dim * sum(stop - start for start, stop in ranges)
        region.add_module(name, SplitRMSNorm(region.get_submodule(name), elements, comm))
