"""The learning rate: a closed form of the optimizer step, the same in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    r"""Linear warm-up to `peak`, then cosine, linear or no decay to `minimum` at `total_steps`.

    peak      /---__                    /-----------\
             /      ""--__             /             \
    minimum /             ""          /               \
           1  warmup      total      1 warmup   decay  total
                 cosine                       wsd

    (optimizer steps, counted from 1). `wsd`, warm-up, stable, decay, falls in a straight line over
    the last `decay_steps` (Hu et al. 2024, "MiniCPM", sec. 4).
    """

    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int
    schedule: str = "cosine"
    decay_steps: int = 0

    def at(self, step: int) -> float:
        """The rate of optimizer step `step` (from 1). Depends on nothing else."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        falls_after = self.warmup_steps
        if self.schedule == "wsd":
            falls_after = max(falls_after, self.total_steps - self.decay_steps)
        decay_steps = max(1, self.total_steps - falls_after)
        progress = min(1.0, max(0.0, (step - falls_after) / decay_steps))
        return self.minimum + (self.peak - self.minimum) * self._share(progress)

    def _share(self, progress: float) -> float:
        """How much of the way from minimum to peak is left after `progress` (0 to 1) of decay."""
        if self.schedule in ("linear", "wsd"):
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))
