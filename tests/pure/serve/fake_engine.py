"""A model whose next token is a function of what the block tables lead to, and a driver for it.

If any table, copy, reuse or preemption is wrong, a continuation reads another one's tokens and its
text differs from the text of that request alone.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from triptych.serve.core.check import broken_budget, broken_invariants
from triptych.serve.core.request import Finished, Progress, Reason, Request, State
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.step import Step
from triptych.serve.core.tables import Tables

STOP_TOKEN = 7


def next_token(tokens: Sequence[int], continuation: int) -> int:
    """The token after `tokens`."""
    return zlib.crc32(np.array([continuation, *tokens], np.int64).tobytes()) % 50


def alone(request: Request, context: int, continuation: int = 0, stops: bool = False) -> list[int]:
    """The text of a request that nobody else disturbs."""
    room = context - len(request.prompt)
    room = room if request.max_tokens is None else min(room, request.max_tokens)
    tokens = list(request.prompt)
    for _ in range(room):
        tokens.append(next_token(tokens, continuation))
        if stops and tokens[-1] == STOP_TOKEN:
            break
    return tokens[len(request.prompt) :]


class Device:
    """Runs steps in order on a cache that holds tokens in place of keys and values."""

    def __init__(self, scheduler: Scheduler) -> None:
        limits = scheduler.limits
        self.tables = Tables(limits)
        self.cache = np.full(limits.num_blocks * limits.block_size, -1, np.int64)
        self.last = np.zeros(limits.max_running, np.int64)
        self.continuations: dict[int, int] = {}

    def run(self, step: Step) -> list[int]:
        """The sampled tokens."""
        size = self.tables.block_size
        for start in step.started:
            self.continuations[start.slot] = start.continuation
        for fork in step.forks:
            self.continuations[fork.slot] = fork.continuation
        rows = self.tables.apply(step)
        for copy in step.copies:
            source, target = copy.source * size, copy.target * size
            self.cache[target : target + size] = self.cache[source : source + size]
        tokens = rows.tokens.astype(np.int64)
        tokens[: len(step.decodes)] = self.last[list(step.decodes)]
        self.cache[rows.cache] = tokens
        sampled = [self._sample(int(s), int(r), rows.positions) for s, r in _samples(rows)]
        self.last[list(step.samples)] = sampled
        return sampled

    def _sample(self, slot: int, row: int, positions: np.ndarray) -> int:
        at = np.arange(positions[row] + 1)
        size = self.tables.block_size
        content = self.cache[self.tables.blocks[slot, at // size] * size + at % size]
        return next_token(content.tolist(), self.continuations[slot])


def _samples(rows) -> zip:  # type: ignore[no-untyped-def, type-arg]
    return zip(rows.samples, rows.sample_rows, strict=True)


@dataclass
class Driver:
    """Plans, runs and completes, and checks every invariant after each event."""

    scheduler: Scheduler
    stops: bool = False  # whether STOP_TOKEN ends a continuation
    now_s: float = 0.0
    pending: list[tuple[Step, list[int]]] = field(default_factory=list)
    texts: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[int, int], Reason] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    batches: dict[int, set[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = Device(self.scheduler)

    def check(self) -> None:
        assert broken_invariants(self.scheduler) == []

    def admit(self, request: Request) -> State:
        state = self.scheduler.admit(request, self.now_s).state
        self.check()
        return state

    def plan(self) -> Step | None:
        step = self.scheduler.plan(self.now_s)
        if step is not None:
            self.check()
            assert broken_budget(self.scheduler, step) == []
            assert Step.from_ints(step.to_ints()) == step
            self.assert_in_one_batch(step)
            self.steps.append(step)
            self.pending.append((step, self.device.run(step)))
        elif not self.pending:
            assert not self.scheduler.book.living, "somebody lives and nothing advances"
        return step

    def assert_in_one_batch(self, step: Step) -> None:
        """Of any `stages` steps in flight, a sequence is in one at most, or samples in one."""
        limits, book = self.scheduler.limits, self.scheduler.book
        slots = {*step.samples}
        if not limits.overlap_chunks:
            slots |= {chunk.slot for chunk in step.chunks}
        running = (*book.prefilling, *book.decoding)
        now = {(s.request.id, s.index) for s in running if s.slot in slots}
        for pending, _ in self.pending:
            if pending.id > step.id - limits.stages:
                assert not now & self.batches[pending.id], "in two batches in flight"
        self.batches[step.id] = now

    def complete(self, duration_s: float = 0.01) -> Progress:
        step, tokens = self.pending.pop(0)
        self.now_s += duration_s
        stopped = {i for i, token in enumerate(tokens) if self.stops and token == STOP_TOKEN}
        progress = self.scheduler.complete(step.id, tokens, self.now_s, stopped)
        self.check()
        for answer, token in zip(progress.answers, progress.tokens, strict=True):
            self.texts[answer].append(token)
        self.note(progress.finished)
        return progress

    def note(self, finished: list[Finished]) -> None:
        for request_id, continuation, reason in finished:
            assert (request_id, continuation) not in self.ends
            self.ends[request_id, continuation] = reason

    def turn(self) -> bool:
        """Plans all it may and completes a step; False when nothing is left to do."""
        while self.plan() is not None:
            pass
        if self.pending:
            self.complete()
        return bool(self.pending or self.scheduler.book.living)

    def run(self, most_turns: int = 100_000) -> None:
        """Runs until nobody lives; the watchdog is a number of steps."""
        for _ in range(most_turns):
            if not self.turn():
                return
        raise AssertionError(f"not done after {most_turns} steps: {self.scheduler.load}")

    def assert_empty(self) -> None:
        """Nothing is left behind."""
        book = self.scheduler.book
        assert book.pool.num_free == self.scheduler.limits.num_blocks
        assert not book.living and not self.scheduler.flights
        assert len(book.free_slots) == self.scheduler.limits.max_running
        assert not self.device.tables.prompts or self.scheduler.book.released
