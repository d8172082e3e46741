"""What the users of a model are promised."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from triptych.serve.core.turns import Claim


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
