"""Steps of a serving plan as the serving cost model prices them, for simulated replicas."""

from __future__ import annotations

import math

from triptych.cost.serving.step import Load, Stepper
from triptych.simulate.replica import StepShape

GRID = 0.05  # sizes of a step that differ by less are priced as one


class PricedSteps:
    """Seconds of each stage. Sizes are rounded to steps of `GRID` so that few are priced anew."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def __call__(self, shape: StepShape) -> tuple[float, ...]:
        """Seconds of a step on each stage, within `GRID` of its exact sizes."""
        key = tuple(map(_rung, _sizes(shape)))
        found = self._known.get(key)
        if found is None:
            found = tuple(self._stepper.stages_s(Load(*map(_size, key))))
            self._known[key] = found
        return found


def _sizes(shape: StepShape) -> tuple[float, ...]:
    """The fields of `Load`."""
    return (
        shape.num_decodes,
        shape.decode_context,
        shape.prefill_tokens,
        shape.prefill_pairs,
        shape.num_samples,
    )


def _rung(size: float) -> int:
    """0 is nothing, 1 a size of one, each more `GRID` larger."""
    return 0 if size < 1 else 1 + round(math.log(size) / math.log1p(GRID))


def _size(rung: int) -> float:
    return (1 + GRID) ** (rung - 1) if rung else 0.0
