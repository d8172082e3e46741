"""Norms in fp64. The library's RMSNorm rounds to fp32 inside, which would hide an exact proof."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from triptych.plan.families import family_of


class WideRMSNorm(nn.Module):
    """RMSNorm computed in the parameter's own (fp64) arithmetic.

    The scale is `offset` + weight: Gemma's norms store what is to be added to one.
    """

    def __init__(self, norm: nn.Module, offset: float) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.offset = offset
        self.variance_epsilon = norm.eps if offset else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * scale along the last dimension."""
        assert isinstance(self.variance_epsilon, float)
        variance = x.square().mean(-1, keepdim=True)
        return (self.offset + self.weight) * (x * torch.rsqrt(variance + self.variance_epsilon))


def widen_norms(causal_lm: nn.Module) -> None:
    """Replaces every RMSNorm of the library by ours, in place, keeping parameters."""
    config = causal_lm.config
    assert isinstance(config, PreTrainedConfig)
    offset = 1.0 - family_of(config.model_type).norm_start
    for name, module in list(causal_lm.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, child = name.rpartition(".")
            causal_lm.get_submodule(parent).add_module(child, WideRMSNorm(module, offset))
