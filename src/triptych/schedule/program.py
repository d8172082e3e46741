"""A pipeline program: for each pipeline rank, the list of its actions."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.schedule.action import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each pipeline rank does in one step, in order.

    `placement[stage]` is the pipeline rank that runs a stage (chunk).
    """

    name: str
    placement: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages (chunks) over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, in model order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def __str__(self) -> str:
        """One line a rank: `rank 0: 0F0 0F1 0B0 ...`."""
        return "\n".join(
            f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.actions)
        )
