"""One continuation of a request while it lives: the scheduler's own record of it."""

from __future__ import annotations

import math

from triptych.serve.core.request import LatencyClass, Request, State

Order = tuple[float, int, int]


class Sequence:
    """Counts of one continuation.

        tokens     ....prompt....answer      known ids
        planned    ....prompt....answer??    and those that steps in flight will sample
        computed   ....prompt....            positions with keys and values, steps in flight counted

    `computed` < `planned` always: the last token has not been an input yet.
    """

    __slots__ = (
        "answer",
        "blocks",
        "capacity",
        "computed",
        "decoding",
        "end",
        "foreseen_s",
        "hashes",
        "index",
        "named",
        "num_forks",
        "order",
        "planned",
        "preemptions",
        "priority",
        "request",
        "shares_tail",
        "slot",
        "state",
        "tokens",
        "tpot_s",
        "waits_for",
    )

    def __init__(
        self, request: Request, index: int, order: Order, end: int, latency: LatencyClass
    ) -> None:
        self.request = request
        self.index = index  # among the continuations of the request
        self.answer = (request.id, index)
        self.order = order  # the one order of all decisions: smaller first
        self.end = end  # tokens when it is complete
        self.priority, self.tpot_s = latency.priority, latency.tpot_s
        self.tokens = list(request.prompt)
        self.state = State.WAITING
        self.slot = -1  # its row in the tables of the ranks while it runs
        self.blocks: list[int] = []
        self.capacity = 0  # positions in its blocks
        self.shares_tail = False  # its last block may be another's too
        self.computed = 0
        self.planned = len(self.tokens)
        self.waits_for = -1  # the step before which it may not be in another one
        self.decoding = False  # whether its last known token is all that is left to compute
        self.hashes: list[bytes] = []  # of its first full blocks
        self.named = 0  # its first blocks that the pool can find by hash
        self.num_forks = request.n - 1  # continuations still to branch off
        self.preemptions = 0
        self.foreseen_s = math.nan  # from arrival to the first token, if it was to wait in line

    @property
    def outstanding(self) -> int:
        """Tokens that steps in flight sample."""
        return self.planned - len(self.tokens)

    @property
    def answered(self) -> int:
        """Tokens of its answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def allowed(self) -> int:
        """Tokens of its answer at its longest."""
        return self.end - len(self.request.prompt)

    def fork(self, index: int) -> Sequence:
        """Another continuation of the same prompt, which shares all blocks."""
        other = Sequence.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(other, name, getattr(self, name))
        other.index, other.order = index, (*self.order[:2], index)
        other.answer = (self.request.id, index)
        other.tokens, other.blocks = list(self.tokens), list(self.blocks)
        other.hashes, other.num_forks = list(self.hashes), 0
        return other

    def __repr__(self) -> str:
        return (
            f"{self.request.id}.{self.index} {self.state} slot {self.slot} "
            f"{self.computed}/{self.planned} tokens blocks {self.blocks}"
        )
