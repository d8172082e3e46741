"""What a rank holds, seen by checkpoints: live boxes of logical tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.plan.layout import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One box of one logical tensor that this rank holds.

    `kind` is weight, master, exp_avg or exp_avg_sq; `shape` is the logical shape; `tensor` is a
    live view with the shape of `box`. `saved` is True on exactly one of the ranks that hold it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    saved: bool
