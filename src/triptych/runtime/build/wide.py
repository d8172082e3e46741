"""Norms and routers in fp64: the library's round to fp32, which would hide an exact proof."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
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
        self.variance_epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * scale along the last dimension."""
        assert isinstance(self.variance_epsilon, float)
        variance = x.square().mean(-1, keepdim=True)
        return (self.offset + self.weight) * (x * torch.rsqrt(variance + self.variance_epsilon))


class WideRouter(nn.Module):
    """The likeliest experts by a softmax over all; their weights add up to one if it normalizes."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: torch.Tensor = router.weight
        self._top_k: int = router.top_k
        self._normalizes: bool = getattr(router, "norm_topk_prob", True)  # Mixtral always does

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., H] to logits [T, E], weights [T, K] and experts [T, K]."""
        logits = functional.linear(x.flatten(0, -2), self.weight)
        weights, experts = logits.softmax(-1).topk(self._top_k)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


class WideGroupRouter(nn.Module):
    """Experts by biased sigmoid scores, within the best groups (DeepSeek-V3, sec. 2.1.2).

    A group's score is the sum of its two best; weights are scores without the bias.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: torch.Tensor = router.weight
        self.e_score_correction_bias: torch.Tensor
        self.register_buffer("e_score_correction_bias", router.e_score_correction_bias)
        self._top_k: int = router.top_k
        self._groups, self._best_groups = int(router.num_group), int(router.topk_group)
        self._normalizes, self._factor = router.norm_topk_prob, router.routed_scaling_factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., H] to logits [T, E], weights [T, K] and experts [T, K]."""
        logits = functional.linear(x.flatten(0, -2), self.weight)
        scores_TE = logits.sigmoid()
        biased_TE = scores_TE + self.e_score_correction_bias
        biased_TGe = biased_TE.view(len(biased_TE), self._groups, -1)
        best_T = biased_TGe.topk(2).values.sum(-1).topk(self._best_groups).indices
        allowed_TG1 = torch.zeros_like(biased_TGe[..., :1], dtype=torch.bool)
        allowed_TG1.scatter_(1, best_T[..., None], True)
        chosen = biased_TGe.masked_fill(~allowed_TG1, float("-inf")).flatten(1).topk(self._top_k)
        weights = scores_TE.gather(1, chosen.indices)
        if self._normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self._factor, chosen.indices


def widen(causal_lm: nn.Module) -> None:
    """Replaces every RMSNorm and router of the library by ours, in place, keeping parameters.

    A router with a bias (GPT-OSS) does not round.
    """
    config = causal_lm.config
    assert isinstance(config, PreTrainedConfig)
    offset = 1.0 - family_of(config.model_type).norm_start
    for name, module in list(causal_lm.named_modules()):
        parent, _, child = name.rpartition(".")
        if type(module).__name__.endswith("RMSNorm"):
            causal_lm.get_submodule(parent).add_module(child, WideRMSNorm(module, offset))
        elif type(module).__name__.endswith("TopKRouter") and not hasattr(module, "bias"):
            causal_lm.get_submodule(parent).add_module(child, WideRouter(module))
        elif type(module).__name__.endswith("TopkRouter"):
            causal_lm.get_submodule(parent).add_module(child, WideGroupRouter(module))
