"""What a plan is for: one training step of a global batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Training: sequences of `sequence_length` tokens, `global_batch` of them an optimizer step."""

    sequence_length: int
    global_batch: int
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.global_batch
