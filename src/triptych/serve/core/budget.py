"""Memory for keys and values that several models share, with a part guaranteed to each.

    free to a model = total - what it holds - the larger of held and guaranteed of each other one

So a busy model may use all that is not guaranteed to others, and its own part is there whenever it
wants it. Blocks that are free but keep content for reuse count as not held.
"""

from __future__ import annotations

from triptych.errors import InputError, Problem
from triptych.units import format_bytes


class Allowance:
    """What one model holds of a budget, in blocks of its own size."""

    def __init__(self, budget: Budget, block_bytes: int, guarantee_bytes: int) -> None:
        self.block_bytes, self.guarantee_bytes = block_bytes, guarantee_bytes
        self.held = 0
        self._budget = budget

    @property
    def num_free(self) -> int:
        """Blocks that it may take now."""
        return max(0, self._budget.free_bytes(self) // self.block_bytes)

    @property
    def num_returns(self) -> int:
        """Times that anybody gave something back."""
        return self._budget.num_returns

    def take(self, count: int) -> None:
        """Holds so many blocks more."""
        self.held += count

    def give(self, count: int) -> None:
        """Holds so many blocks less."""
        self.held -= count
        self._budget.num_returns += 1

    def leave(self) -> None:
        """Gives up everything: the model has gone."""
        self._budget.allowances.remove(self)
        self._budget.num_returns += 1


class Budget:
    """Bytes of one device, or of each device of a group."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allowances: list[Allowance] = []
        self.num_returns = 0

    def join(self, block_bytes: int, guarantee_bytes: int, least_blocks: int = 1) -> Allowance:
        """A part of the budget for one model more.

        Args:
            block_bytes: of a block of its keys and values.
            guarantee_bytes: that others cannot take; never less than `least_blocks`.
            least_blocks: those of one request at its longest, so that what is admitted can end.

        Raises:
            InputError: if all guarantees together are more than there is, with the bytes.

        """
        guarantee_bytes = max(guarantee_bytes, least_blocks * block_bytes)
        reserved = sum(allowance.guarantee_bytes for allowance in self.allowances)
        if reserved + guarantee_bytes > self.total_bytes:
            raise InputError(
                Problem(
                    f"{guarantee_bytes} bytes ({format_bytes(guarantee_bytes)}) of keys and values "
                    "for one model more",
                    f"{max(0, self.total_bytes - reserved)} of {self.total_bytes} bytes are not "
                    "guaranteed to others",
                    "smaller guarantees, a shorter context, fewer models in the group",
                )
            )
        allowance = Allowance(self, block_bytes, guarantee_bytes)
        self.allowances.append(allowance)
        return allowance

    def free_bytes(self, own: Allowance) -> int:
        """What one of them may take beside what it holds."""
        taken = own.held * own.block_bytes
        for other in self.allowances:
            if other is not own:
                taken += max(other.held * other.block_bytes, other.guarantee_bytes)
        return self.total_bytes - taken
