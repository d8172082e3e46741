"""The invariants of the books, checked as a whole: tests call this after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from triptych.serve.core.book import Book
from triptych.serve.core.request import State
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.sequence import Sequence
from triptych.serve.core.step import Step


def broken_invariants(scheduler: Scheduler) -> list[str]:
    """What is wrong with a scheduler's state; empty if nothing is."""
    book = scheduler.book
    return [*_blocks(book), *_names(book), *_slots(book), *_lists(book), *_counts(scheduler)]


def broken_budget(scheduler: Scheduler, step: Step) -> list[str]:
    """What is wrong with a step that was just planned; empty if nothing is."""
    limits, found = scheduler.limits, []
    slots = [*step.decodes, *(chunk.slot for chunk in step.chunks)]
    if not 1 <= step.num_tokens <= limits.token_budget:
        found.append(f"{step.num_tokens} tokens in a step of at most {limits.token_budget}")
    if len(set(slots)) != len(slots):
        found.append(f"a slot twice in one step: {slots}")
    if len(scheduler.flights) > limits.depth:
        found.append(f"{len(scheduler.flights)} steps in flight of at most {limits.depth}")
    return found


def _blocks(book: Book) -> Iterator[str]:
    """Every block is held, blank or cached, exactly once; counts are those of the tables."""
    held = Counter(block for s in (*book.prefilling, *book.decoding) for block in s.blocks)
    for block, count in enumerate(book.pool.counts):
        if count != held[block]:
            yield f"block {block}: count {count}, in {held[block]} tables"
    places = Counter([*held.keys(), *book.pool.blank, *book.pool.cached])
    for block in range(book.limits.num_blocks):
        if places[block] != 1:
            yield f"block {block} is in {places[block]} of held, blank and cached"
    allowance = book.pool.allowance
    if allowance is not None and allowance.held != len(held):
        yield f"{len(held)} blocks are held, {allowance.held} of the budget"


def _names(book: Book) -> Iterator[str]:
    """Names lead to their blocks and back; cached blocks have one, blank ones none."""
    pool = book.pool
    named = {block: content for block, content in enumerate(pool.hashes) if content is not None}
    if {content: block for block, content in named.items()} != pool.by_hash:
        yield "hashes of blocks and blocks of hashes differ"
    yield from (f"cached block {block} has no name" for block in pool.cached if block not in named)
    yield from (f"blank block {block} has a name" for block in pool.blank if block in named)


def _slots(book: Book) -> Iterator[str]:
    """Every slot is free or some running sequence's; continuations to come have theirs."""
    used = [s.slot for s in (*book.prefilling, *book.decoding)]
    if sorted([*used, *book.free_slots]) != list(range(book.limits.max_running)):
        yield f"slots used {used}, free {book.free_slots}"
    promised = sum(s.num_forks for s in book.prefilling)
    if not promised == book.num_promised <= len(book.free_slots):
        yield f"{book.num_promised} slots promised, {promised} due, {len(book.free_slots)} free"


def _lists(book: Book) -> Iterator[str]:
    """Each living sequence is in one list, in order, and nobody else is."""
    groups = (book.waiting, book.prefilling, book.decoding)
    living = Counter(id(s) for siblings in book.living.values() for s in siblings)
    if living != Counter(id(s) for group in groups for s in group):
        yield "the lists and the living differ"
    for group in groups:
        if any(a.order >= b.order for a, b in pairwise(group)):
            yield "a list is out of order"
        for sequence in group:
            yield from _sequence(book, sequence, runs=group is not book.waiting)


def _sequence(book: Book, s: Sequence, runs: bool) -> Iterator[str]:
    if (s.state is State.RUNNING) != runs or (s.slot >= 0) != runs or bool(s.blocks) != runs:
        yield f"neither waits nor runs: {s}"
    if s.capacity != len(s.blocks) * book.limits.block_size or s.computed > s.capacity:
        yield f"more computed than its blocks hold: {s}"
    if not (s.computed < s.planned <= s.end and s.outstanding >= 0):
        yield f"tokens do not add up: {s}, {len(s.tokens)} known"
    if s.decoding and s.computed != s.planned - 1:
        yield f"decodes with more than one token to compute: {s}"


def _counts(scheduler: Scheduler) -> Iterator[str]:
    """Tokens outstanding are those of steps in flight."""
    due = Counter(id(s) for flight in scheduler.flights for s in flight.samplers)
    for siblings in scheduler.book.living.values():
        for s in siblings:
            if s.outstanding != due[id(s)]:
                yield f"{s} waits for {s.outstanding} tokens, {due[id(s)]} are in flight"
