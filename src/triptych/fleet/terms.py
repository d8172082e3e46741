"""What the users of a model are promised, and how its steps have been: both are learnt and kept by
whoever routes requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from triptych.serve.core.turns import Claim

_HALF_LIFE = 300  # steps, after which half of what was seen is forgotten
_UNKNOWN = (1e-6, 1e-7, 1e-8)  # nearly nothing: enough to send requests where least is to be done


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The objectives of a model and its claim on the groups that hold it.

    Args:
        ttft_s: from arrival to the first token.
        tpot_s: a token after that, on average.
        answer_s: from arrival to the last token.
        claim: weight and guarantee.

    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    answer_s: float = math.inf
    claim: Claim = field(default_factory=Claim)

    def scaled(self, factor: float) -> Terms:
        """The same claim with all objectives multiplied."""
        return replace(
            self,
            ttft_s=self.ttft_s * factor,
            tpot_s=self.tpot_s * factor,
            answer_s=self.answer_s * factor,
        )

    def met(self, ttft_s: float, answer_s: float, num_tokens: float) -> bool:
        """Whether an answer kept all objectives, `num_tokens` long."""
        return not self.missed(ttft_s, answer_s, num_tokens)

    def missed(self, ttft_s: float, answer_s: float, num_tokens: float) -> tuple[str, float] | None:
        """The objective that an answer breaks most, in words, and by how many seconds."""
        tpot_s = (answer_s - ttft_s) / max(1, num_tokens - 1)
        found = [
            (f"the first token would come after {ttft_s:.3g} s, the objective is {self.ttft_s:g} s",
             ttft_s - self.ttft_s),
            (f"a token would take {tpot_s:.3g} s, the objective is {self.tpot_s:g} s",
             (tpot_s - self.tpot_s) * num_tokens),
            (f"the answer would take {answer_s:.3g} s, the objective is {self.answer_s:g} s",
             answer_s - self.answer_s),
        ]  # fmt: skip
        worst = max(found, key=lambda each: each[1])
        return worst if worst[1] > 0 else None


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
    free.
    """

    def __init__(self, price: StepPrice | None = None, weight: float = 20.0) -> None:
        self._products = np.zeros((3, 3))
        self._seconds = np.zeros(3)
        self._kept = 0.5 ** (1 / _HALF_LIFE)
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
