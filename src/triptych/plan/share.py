"""Which rows of every global batch a data rank takes.

A global batch is cut into rounds, one micro-batch of the pipeline each. The data ranks of a stage
take equal parts of a round in order, whatever the degree: so a micro-batch is the same rows on
every stage, and in every layout.

    stage 0, data=2      0 0 1 1 | 0 0 1 1        rows 0..3 are micro-batch 0
    stage 1, data=4      0 1 2 3 | 0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.plan.plan import Plan
from triptych.plan.ranks import Coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a data rank: `microbatch` rows of each round of `microbatch` x `dp`."""

    microbatch: int
    dp: int = 1
    dp_index: int = 0

    @classmethod
    def of(cls, plan: Plan, at: Coordinates) -> Share:
        """The share of the ranks at some coordinates, by the degrees of their own stages."""
        stage = plan.stages[at.pp]
        return cls(microbatch=plan.microbatch_of(stage), dp=stage.data, dp_index=at.dp)

    def chunks(self, num_samples: int) -> list[range]:
        """The places in a global batch of this rank's micro-batches, in order.

        Every rank gets as many; in an uneven batch some reach beyond `num_samples`.
        """
        rounds = -(-num_samples // (self.microbatch * self.dp))
        starts = [(j * self.dp + self.dp_index) * self.microbatch for j in range(rounds)]
        return [range(start, start + self.microbatch) for start in starts]
