"""How decodes keep their TPOT objective: prompts get less of a step, and fewer sequences run."""

from __future__ import annotations

import math

from triptych.serve.core.price import StepTimes

STEPS = 32
"""Steps after which half of what the last ones took is forgotten: a machine's own rate changes."""

_KEPT = 0.5 ** (1 / 300)  # of what steps held, from one to the next


class Pace:
    """What a step may hold beside decodes, and how many sequences may run.

    After each step that lasted longer than the tightest objective among its decodes, the allowance
    for prefill shrinks in proportion, by half at most; after a shorter one it grows by a quarter.
    It never falls below an eighth of the budget, so prompts go on.

    How long steps of more sequences would last is foreseen from those that were seen. A sequence
    brings its prompt too, later or sooner: beside each decode as much prefill is expected as there
    was of late.

    Args:
        token_budget: tokens of a step.
        stages: batches that running sequences are divided over.
        margin: part of the objective that a prediction must leave.

    """

    def __init__(self, token_budget: int, stages: int = 1, margin: float = 0.0) -> None:
        self._budget = token_budget
        self._least = max(1, token_budget // 8)
        self.allowance = token_budget
        self._stages, self._share = stages, 1.0 - margin
        self._times = StepTimes(half_life=STEPS)
        self._decodes = self._prefill_tokens = 0.0  # sums that fade together

    def note(
        self, duration_s: float, objective_s: float, num_decodes: int = 0, prefill_tokens: int = 0
    ) -> None:
        """Takes in how long the rows of a step waited for it."""
        if math.isinf(objective_s) or duration_s <= 0:
            self.allowance = self._budget
            return
        ratio = min(max(objective_s / duration_s, 0.5), 1.25)
        self.allowance = min(self._budget, max(self._least, math.ceil(self.allowance * ratio)))
        self._times.saw(num_decodes, prefill_tokens, duration_s)
        self._decodes = self._decodes * _KEPT + num_decodes
        self._prefill_tokens = self._prefill_tokens * _KEPT + prefill_tokens

    @property
    def is_known(self) -> bool:
        """Whether sequences with an objective have run."""
        return self._decodes > 0

    def most(self, objective_s: float) -> float:
        """How many sequences keep an objective at once; infinite if not even one would."""
        if math.isinf(objective_s) or not self.is_known:
            return math.inf
        each_s, room_s = self._each_s, objective_s * self._share - self._times.price.fixed_s
        each = math.floor(room_s / each_s + 1e-9) if each_s else math.inf
        return each * self._stages if each >= 1 else math.inf

    def token_s(self, num_running: int) -> float:
        """Seconds from token to token while so many run; 0 if nothing is known."""
        if not self.is_known:
            return 0.0
        return self._times.price.fixed_s + num_running / self._stages * self._each_s

    @property
    def _each_s(self) -> float:
        """Seconds that a sequence adds to a step, its part of prompts included."""
        price = self._times.price
        return price.decode_s + price.prompt_s * self._prefill_tokens / self._decodes
