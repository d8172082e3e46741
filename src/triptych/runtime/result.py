"""What a step of training gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.runtime.comm import Pending
from triptych.runtime.expert.balance import RouterResult
from triptych.runtime.scaling import Scaling, read


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back; `loss` and `grad_norm` are read from the device when asked for."""

    scalars: Pending  # loss, norm, flags; then what routers tell
    tokens: int
    time_s: dict[str, float]
    bytes_sent: dict[str, int]
    told: torch.Tensor | None = None  # by loss scaling

    @property
    def loss(self) -> float:
        """Mean cross-entropy over all trained tokens of the global batch."""
        return float(self.scalars.wait()[0])

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping; each parameter counts once."""
        return float(self.scalars.wait()[1])

    @property
    def flagged(self) -> bool:
        """True if a rank raised its flag with this step."""
        return bool(self.scalars.wait()[2] > 0)

    @property
    def router(self) -> RouterResult | None:
        """Losses of the routers, and what a capacity dropped; None for a model without experts."""
        scalars = self.scalars.wait()
        if len(scalars) == 3:
            return None
        aux_loss, z_loss, dropped = scalars[3:].tolist()
        return RouterResult(aux_loss, z_loss, round(dropped))

    @property
    def scaling(self) -> Scaling | None:
        """What loss scaling did, if the precision needs it."""
        return None if self.told is None else read(self.told)
