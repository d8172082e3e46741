"""What steps cost, learnt from those that were seen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

_HALF_LIFE = 300  # steps, after which half of what was seen is forgotten
_UNKNOWN = (1e-6, 1e-7, 1e-8)  # nearly nothing: enough to send requests where least is to be done


class StepPrice(NamedTuple):
    """Seconds of a step through the whole group: of any, and of each row of either kind."""

    fixed_s: float = 0.0
    decode_s: float = 0.0
    prompt_s: float = 0.0

    def of(self, num_passes: float, decodes: float, prompt_tokens: float) -> float:
        """Seconds of some steps that hold so many rows together."""
        return num_passes * self.fixed_s + decodes * self.decode_s + prompt_tokens * self.prompt_s


class StepTimes:
    """The price of steps by least squares over those seen of late, none of its parts negative.

    A price that is given beforehand counts as much as `weight` steps. What is not known is nearly
    free. After `half_life` steps half of what was seen is forgotten.
    """

    def __init__(
        self,
        price: StepPrice | None = None,
        weight: float = 20.0,
        half_life: float = _HALF_LIFE,
    ) -> None:
        self._products = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._kept = 0.5 ** (1 / half_life)
        self.is_known = price is not None
        self._price: StepPrice | None = price or StepPrice(*_UNKNOWN)
        if price is not None:
            typical = np.diag([1.0, 4.0, 64.0]) ** 2 * weight
            self._products += typical
            self._seconds += typical @ np.array(price)

    def saw(self, num_decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Takes in a step."""
        rows = np.array([1.0, num_decodes, prompt_tokens])
        self._products = self._products * self._kept + np.outer(rows, rows)
        self._seconds = self._seconds * self._kept + rows * seconds
        self._price, self.is_known = None, True

    @property
    def price(self) -> StepPrice:
        """What steps cost now."""
        if self._price is None:
            # Least squares from its normal equations: minimise |L' x - L^-1 b| with A = L L'.
            lower = np.linalg.cholesky(self._products + np.eye(3) * 1e-9)
            found, _ = nnls(lower.T, np.linalg.solve(lower, self._seconds))
            self._price = StepPrice(*found.tolist())
        return self._price
