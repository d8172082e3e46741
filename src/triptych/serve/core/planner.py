"""What one step computes: decodes first, then prompts, within the token budget."""

from __future__ import annotations

import math
from collections.abc import Iterator

from triptych.serve.core.book import Book
from triptych.serve.core.pace import Pace
from triptych.serve.core.sequence import Sequence
from triptych.serve.core.step import Append, Chunk, Copy, Fork, Start, Step


class Draft:
    """A step while it is being planned."""

    def __init__(self, step_id: int, horizon: int) -> None:
        self.id = step_id
        self.horizon = horizon  # the last step that nobody has to wait for any more
        self.samplers: list[Sequence] = []
        self.turns: list[int] = []  # places of samplers for which more than a token changes
        self.touched: list[Sequence] = []  # whose prompts it computes
        self.started: list[Start] = []
        self.forks: list[Fork] = []
        self.appended: list[Append] = []
        self.copies: list[Copy] = []
        self.decodes: list[int] = []
        self.chunks: list[Chunk] = []
        self.prefill_tokens = 0
        self.tightest_tpot_s = math.inf
        self.is_saturated = False  # no room for another prompt token, or for who waits first

    def step(self, released: list[int]) -> Step:
        """The value to broadcast."""
        return Step(
            self.id,
            tuple(released),
            tuple(self.started),
            tuple(self.forks),
            tuple(self.appended),
            tuple(self.copies),
            tuple(self.decodes),
            tuple(self.chunks),
        )


class StepPlanner:
    """Fills drafts from the books."""

    def __init__(self, book: Book, pace: Pace) -> None:
        self.book = book
        self.pace = pace
        self.limits = book.limits
        self._blocked: tuple[Sequence, int, int] | None = None

    def fill(self, draft: Draft) -> None:
        """Plans all that fits."""
        self._make_room(draft)
        self._decode(draft)
        self._prefill(draft)

    def most_running(self, head: Sequence | None = None) -> float:
        """How many may run with a sequence that waits, so that all keep their TPOT objectives.

        It is not held back for those of lower priority, nor if nobody runs.
        """
        if not self.pace.is_known:
            return self.limits.max_running
        running = (*self.book.decoding, *self.book.prefilling)
        if not running or (head and any(s.priority > head.priority for s in running)):
            return self.limits.max_running
        tightest_s = min(s.tpot_s for s in (*running, *((head,) if head else ())))
        return min(self.limits.max_running, self.pace.most(tightest_s))

    def _make_room(self, draft: Draft) -> None:
        """Preempts running sequences of lower priority for the first that waits, if that helps."""
        book = self.book
        if not book.waiting or not self._ready(book.waiting[0], draft):
            return
        head, pool = book.waiting[0], book.pool
        victims = [
            s
            for s in (*book.prefilling, *book.decoding)
            if s.priority > head.priority and s.order > head.order
        ]
        if not victims or book.fitting(head) is not None:
            return
        blocks = sum(pool.counts[block] == 1 for victim in victims for block in victim.blocks)
        needed = self.limits.blocks(len(head.tokens)) + book.spare(book.num_running - len(victims))
        slots = len(book.free_slots) - book.num_promised
        slots += sum(1 + victim.num_forks for victim in victims)
        if blocks + pool.num_free < needed or slots <= head.num_forks:
            return
        for victim in sorted(victims, key=lambda s: s.order, reverse=True):
            if book.fitting(head) is not None:
                break
            book.preempt(victim)

    def _decode(self, draft: Draft) -> None:
        """One token of each sequence that decodes; a pipeline divides them over its batches."""
        decoding, horizon, step_id = self.book.decoding, draft.horizon, draft.id
        slots, samplers, turns = draft.decodes, draft.samplers, draft.turns
        share, tightest = -(-len(decoding) // self.limits.stages), math.inf
        for sequence in decoding:  # those due later may be preempted on the way
            if sequence.waits_for > horizon or sequence.planned == sequence.end:
                continue
            grows = sequence.computed == sequence.capacity or sequence.shares_tail
            if grows and not self._grow(sequence, draft):
                break
            sequence.computed = computed = sequence.computed + 1
            sequence.planned = planned = sequence.planned + 1
            sequence.waits_for = step_id
            if computed == sequence.capacity or planned == sequence.end:
                turns.append(len(slots))
            slots.append(sequence.slot)
            samplers.append(sequence)
            if sequence.tpot_s < tightest:
                tightest = sequence.tpot_s
            if len(slots) == share:
                break
        draft.tightest_tpot_s = tightest

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Makes the next position of a sequence its own to write; False if it was preempted.

        Blocks come from the sequences that are due last, none of which is in this step yet.
        """
        book, size = self.book, self.limits.block_size
        while True:
            full = sequence.computed == sequence.capacity
            if not full and book.pool.counts[sequence.blocks[-1]] == 1:
                break
            if book.pool.num_free:
                self._own_tail(sequence, draft, full)
                break
            victim = book.latest()
            assert victim is not None and victim.order >= sequence.order
            book.preempt(victim)
            if victim is sequence:
                return False
        sequence.capacity = len(sequence.blocks) * size
        sequence.shares_tail = False
        return True

    def _own_tail(self, sequence: Sequence, draft: Draft, full: bool) -> None:
        """A new last block, or a copy of the shared one."""
        (block,) = self.book.pool.allocate(1)
        if full:
            sequence.blocks.append(block)
            draft.appended.append(Append(sequence.slot, block))
            return
        position, source = len(sequence.blocks) - 1, sequence.blocks[-1]
        self.book.pool.release([source])
        sequence.blocks[-1] = block
        draft.copies.append(Copy(sequence.slot, position, source, block))

    def _prefill(self, draft: Draft) -> None:
        """Chunks of prompts in the order in which they are due, waiting ones started on the way."""
        budget = min(self.pace.allowance, self.limits.token_budget - len(draft.decodes))
        for sequence in self._candidates(draft):
            budget -= self._chunk(sequence, draft, budget)
            if budget <= 0:
                draft.is_saturated = True
                return

    def _candidates(self, draft: Draft) -> Iterator[Sequence]:
        """Prompts to compute, earliest due first; who waits and cannot start holds the line."""
        running = [s for s in self.book.prefilling if s.waits_for <= draft.horizon]
        running.reverse()
        waiting, may_start = self.book.waiting, True
        while running or (may_start and waiting):
            if may_start and waiting and (not running or waiting[0].order < running[-1].order):
                head = waiting[0]
                may_start = self._start(head, draft)
                if may_start:
                    yield head
            else:
                yield running.pop()

    def _start(self, head: Sequence, draft: Draft) -> bool:
        """Starts a waiting sequence if it fits; asks again only after somebody has left."""
        if not self._ready(head, draft):
            return False
        state = (head, self.book.num_departures, self.book.pool.num_returns)
        hits = self.book.fitting(head) if state != self._blocked else None
        if hits is None:
            self._blocked, draft.is_saturated = state, True
            return False
        if self.book.num_running + 1 + head.num_forks > self.most_running(head):
            draft.is_saturated = True
            return False
        draft.started.append(self.book.start(head, hits))
        return True

    def _ready(self, sequence: Sequence, draft: Draft) -> bool:
        """Whether no step in flight still works for it."""
        return sequence.outstanding == 0 and sequence.waits_for <= draft.horizon

    def _chunk(self, sequence: Sequence, draft: Draft, budget: int) -> int:
        """Plans the next tokens of a prompt; returns their number."""
        start, known = sequence.computed, len(sequence.tokens)
        count = min(budget, known - start)
        sequence.computed += count
        draft.prefill_tokens += count
        draft.touched.append(sequence)
        is_last = sequence.computed == known
        if is_last or not self.limits.overlap_chunks:
            sequence.waits_for = draft.id
        samples = self._samplers(sequence, draft) if is_last else []
        slots = tuple(sampler.slot for sampler in samples)
        first = len(draft.samplers)
        draft.turns += range(first, first + len(samples))
        draft.samplers += samples
        draft.chunks.append(Chunk(sequence.slot, start, count, slots))
        return count

    def _samplers(self, sequence: Sequence, draft: Draft) -> list[Sequence]:
        """Who samples from the last row of a complete prompt: all its continuations."""
        sequence.planned += 1
        partial = sequence.computed < sequence.capacity
        sequence.shares_tail = sequence.num_forks > 0 and partial
        self.book.decode(sequence)
        children = self.book.branch(sequence)
        draft.forks += [Fork(sequence.slot, c.slot, c.request.id, c.index) for c in children]
        return [sequence, *children]
