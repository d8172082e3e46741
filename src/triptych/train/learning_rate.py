"""The learning rate: a closed form of the optimizer step, the same in every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to `peak`, then cosine, linear or no decay to `minimum` at `total_steps`.

    peak      /---__
             /      ""--__
    minimum /             ""
           1  warmup      total      (optimizer steps, counted from 1)
    """

    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int
    schedule: str = "cosine"

    def at(self, step: int) -> float:
        """The rate of optimizer step `step` (from 1). Depends on nothing else."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        return self.minimum + (self.peak - self.minimum) * self._share(progress)

    def _share(self, progress: float) -> float:
        """How much of the way from minimum to peak is left after `progress` (0 to 1) of decay."""
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))
