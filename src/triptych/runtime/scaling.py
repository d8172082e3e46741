"""Dynamic loss scaling for fp16, whose smallest numbers are too large for many gradients.

The loss is multiplied by a power of two before the backward and the update divides by it. A step
whose gradient norm is not finite is not applied and halves the scale; many good steps in a row
double it. All of it happens on the device, from a norm that is global, so that ranks agree and the
host never waits.

Source: Micikevicius et al. 2018, "Mixed precision training", sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

FIRST, LEAST = 2.0**16, 1.0
GROWTH_STEPS = 2000
"""Good steps in a row after which the scale is doubled."""


class Scaling(NamedTuple):
    """What loss scaling did in a step.

    `is_skipped`: gradients overflowed, the step was not applied and a smaller scale may help.
    """

    loss_scale: float
    skipped_steps: int  # so far
    is_skipped: bool


class LossScale:
    """The scale, the good steps in a row and the steps skipped so far, scalars on a device."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), FIRST, device=device)
        self._good = torch.zeros((), device=device)
        self._skipped = torch.zeros((), device=device)

    def update(self, norm: torch.Tensor) -> torch.Tensor:
        """Follows a step's global gradient norm; what `read` understands, fp64 [3]."""
        overflows = ~torch.isfinite(norm)
        may_help = overflows & (self.value > LEAST)
        self._good.add_(1.0).masked_fill_(overflows, 0.0)
        grows = self._good >= GROWTH_STEPS
        self._good.masked_fill_(grows, 0.0)
        self._skipped.add_(overflows)
        self.value.mul_(torch.where(overflows, 0.5, torch.where(grows, 2.0, 1.0)))
        self.value.clamp_(min=LEAST)
        return torch.stack((self.value, self._skipped, may_help)).double()

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {
            "loss_scale": float(self.value),
            "good_steps": float(self._good),
            "skipped_steps": float(self._skipped),
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Goes on from a checkpoint."""
        self.value.fill_(state["loss_scale"])
        self._good.fill_(state["good_steps"])
        self._skipped.fill_(state["skipped_steps"])


def read(told: torch.Tensor) -> Scaling:
    """What `LossScale.update` told; waits for the device."""
    value, skipped, may_help = told.tolist()
    return Scaling(value, int(skipped), bool(may_help))
