"""Packed projections under tensor parallelism: `[queries | keys | values]`, `[gate | up]`.

On the hub's disks they are one matrix. A rank holds a box of each part, so each part becomes a
linear of its own whose parameter is one box; their outputs stand side by side as before. With one
tensor rank the matrix stays whole.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import nn

from triptych.plan.families import Family

_PART = re.compile(r"^(.+)\.parts\.(\d+)\.(\w+)$")


class PackedLinear(nn.Module):
    """The outputs of several linears of one input, side by side.

    Until they are cut, the parameters of every part have the shape of the whole matrix.
    """

    def __init__(self, linear: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(copy.deepcopy(linear) for _ in range(num_parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., the widths of all parts]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


def pack(layer: nn.Module, family: Family) -> None:
    """Gives every packed linear of a decoder layer a linear for each of its parts, in place."""
    for key, rule in family.rules.items():
        name, _, kind = key.rpartition(".")
        if len(rule.splits) > 1 and kind == "weight":
            parent, _, child = name.rpartition(".")
            packed = PackedLinear(layer.get_submodule(name), len(rule.splits))
            layer.get_submodule(parent).add_module(child, packed)


def unpacked_name(name: str) -> tuple[str, int]:
    """The logical tensor that a parameter belongs to, and which part of it: 0 if not packed."""
    match = _PART.match(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (name, 0)
