"""Experts that see a token times its score, beside a shared one that sees it as it is: Llama 4.

The library runs every expert on every token, times a score that is zero but for the chosen ones;
here only the chosen ones run. Shapes: B batch, S sequence, T = B x S tokens, E experts, K a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class SigmoidRouter(nn.Module):
    """The experts with the largest logits; weights are the sigmoids of these."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight: torch.Tensor = router.weight
        self._top_k: int = router.top_k

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] to logits [T, E], weights [T, K] and experts [T, K]."""
        logits = functional.linear(x_TH, self.weight)
        best, experts = logits.topk(self._top_k, dim=1)
        wide = torch.promote_types(best.dtype, torch.float32)
        return logits, best.to(wide).sigmoid().to(best.dtype), experts


class ScaledExperts(nn.Module):
    """A layer's router, routed experts (which scale their inputs) and shared expert."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.router = SigmoidRouter(block.router)
        self.experts = block.experts
        self.shared_expert = block.shared_expert

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, H] to [B, S, H], and the router's logits, which the layer drops."""
        x_TH = hidden_states.flatten(0, 1)
        logits, weight_TK, index_TK = self.router(x_TH)
        y_TH = self.shared_expert(x_TH) + self.experts(x_TH, index_TK, weight_TK)
        return y_TH.view(hidden_states.shape), logits
