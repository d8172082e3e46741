"""Who waits, who runs, and who holds which slot and blocks: the scheduler's books.

Every living sequence is in exactly one list, each sorted by `order`:

    waiting      holds nothing (new, or preempted: its tokens are computed again)
    prefilling   has a slot and blocks for all its known tokens, not all of them computed
    decoding     has a slot; one token at a time
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter

from triptych.serve.core.blocks import BlockPool, extend_hashes
from triptych.serve.core.budget import Allowance
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import State
from triptych.serve.core.sequence import Sequence
from triptych.serve.core.step import Start

_ORDER = attrgetter("order")


class Book:
    """The lists, the pool and the slots, and the moves between them."""

    def __init__(self, limits: Limits, allowance: Allowance | None = None) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, allowance)
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.living: dict[int, list[Sequence]] = {}  # by request id
        self.free_slots = list(range(limits.max_running))  # a heap: the lowest is taken
        self.num_promised = 0  # free slots that continuations still to branch off will take
        self.released: list[int] = []  # slots to be told to the ranks with the next step
        self.num_departures = 0  # times that a slot or blocks came free
        self.num_preemptions = 0
        self.num_reused_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self.prefilling) + len(self.decoding)

    def enter(self, sequence: Sequence) -> None:
        """Lets a new sequence wait."""
        self.living.setdefault(sequence.request.id, []).append(sequence)
        if self.limits.prefix_reuse:
            self._hash(sequence)
        insort(self.waiting, sequence, key=_ORDER)

    def latest(self) -> Sequence | None:
        """The running sequence that is due last."""
        ends = [group[-1] for group in (self.prefilling, self.decoding) if group]
        return max(ends, key=_ORDER, default=None)

    def fitting(self, sequence: Sequence) -> list[int] | None:
        """The blocks that a waiting sequence could reuse, if it could start now; else None.

        Its last known token is never reused, so that it has a logit. Beside others it leaves room
        for each of them to grow.
        """
        if len(self.free_slots) - self.num_promised <= sequence.num_forks:
            return None
        size, known = self.limits.block_size, len(sequence.tokens)
        hits = self.pool.find(sequence.hashes[: (known - 1) // size])
        num_free = self.pool.num_free - sum(self.pool.counts[block] == 0 for block in hits)
        needed = self.limits.blocks(known) - len(hits) + self.spare(self.num_running)
        return hits if needed <= num_free else None

    def spare(self, num_running: int) -> int:
        """Blocks that are left free for so many sequences to grow."""
        return self.limits.blocks(num_running * self.limits.growth_tokens)

    def start(self, sequence: Sequence, hits: list[int]) -> Start:
        """Gives the first waiting sequence a slot and blocks for all its known tokens."""
        self.waiting.remove(sequence)
        for block in hits:
            self.pool.share(block)
        num_new = self.limits.blocks(len(sequence.tokens)) - len(hits)
        sequence.blocks = hits + self.pool.allocate(num_new)
        sequence.capacity = len(sequence.blocks) * self.limits.block_size
        sequence.computed = len(hits) * self.limits.block_size
        sequence.named = len(hits)
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.state = State.RUNNING
        self.num_promised += sequence.num_forks
        self.num_reused_tokens += sequence.computed
        insort(self.prefilling, sequence, key=_ORDER)
        return Start(
            sequence.slot,
            sequence.request.id,
            sequence.index,
            sequence.computed,
            tuple(sequence.tokens[sequence.computed :]),
            tuple(sequence.blocks),
        )

    def decode(self, sequence: Sequence) -> None:
        """Moves a sequence whose prompt is complete to those that decode."""
        _take_out(self.prefilling, sequence)
        sequence.decoding = True
        insort(self.decoding, sequence, key=_ORDER)

    def branch(self, parent: Sequence) -> list[Sequence]:
        """The other continuations of a prompt that is complete, in the slots kept for them."""
        children = []
        for index in range(1, parent.num_forks + 1):
            child = parent.fork(index)
            child.slot = heapq.heappop(self.free_slots)
            for block in child.blocks:
                self.pool.share(block)
            self.living[child.request.id].append(child)
            insort(self.decoding, child, key=_ORDER)
            children.append(child)
        self.num_promised -= parent.num_forks
        parent.num_forks = 0
        return children

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and blocks from a running sequence; it waits, and computes all again."""
        self._vacate(sequence)
        sequence.state = State.PREEMPTED
        sequence.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_ORDER)

    def leave(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is."""
        if sequence.state is State.RUNNING:
            self._vacate(sequence)
        else:
            _take_out(self.waiting, sequence)
        sequence.state = State.FINISHED
        siblings = self.living[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.living[sequence.request.id]

    def name_blocks(self, sequence: Sequence) -> None:
        """Lets others find the blocks of a running sequence that are full of known tokens."""
        size = self.limits.block_size
        num_full = min(len(sequence.tokens), sequence.computed) // size
        if num_full > sequence.named:
            self._hash(sequence)
            for index in range(sequence.named, num_full):
                self.pool.name(sequence.blocks[index], sequence.hashes[index])
            sequence.named = num_full

    def _hash(self, sequence: Sequence) -> None:
        request, size = sequence.request, self.limits.block_size
        extend_hashes(sequence.hashes, sequence.tokens, size, request.salt)

    def _vacate(self, sequence: Sequence) -> None:
        _take_out(self.decoding if sequence.decoding else self.prefilling, sequence)
        self.pool.release(sequence.blocks)
        heapq.heappush(self.free_slots, sequence.slot)
        self.released.append(sequence.slot)
        self.num_promised -= sequence.num_forks
        self.num_departures += 1
        sequence.slot, sequence.blocks, sequence.capacity = -1, [], 0
        sequence.computed = sequence.named = 0
        sequence.decoding = sequence.shares_tail = False


def _take_out(group: list[Sequence], sequence: Sequence) -> None:
    """Removes a sequence from its sorted list."""
    index = bisect_left(group, sequence.order, key=_ORDER)
    assert group[index] is sequence
    del group[index]
