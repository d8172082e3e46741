"""One step as a value: what the scheduler broadcasts and every rank applies to its tables.

A rank keeps, for each slot, a block table, the tokens it was given and how many positions are
computed. A step says only what changes:

    released   slots whose sequence has gone
    started    sequences that take a slot: tokens from the first one to compute, block table
    forks      slots that begin as a copy of another one's table, at its last prompt token
    appended   a block added to a table
    copies     a block of a table replaced by a copy of its content (before anything is written)
    decodes    slots that compute their last sampled token, and sample
    chunks     slots that compute more of their tokens, and the slots that sample from the last

They apply in this order. Steps run in the order of their ids on every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Start(NamedTuple):
    """A sequence takes a slot."""

    slot: int
    request_id: int
    continuation: int  # 0 <= continuation < n
    computed: int  # positions whose keys and values are in reused blocks
    tokens: tuple[int, ...]  # from position `computed` on
    blocks: tuple[int, ...]


class Fork(NamedTuple):
    """A continuation branches off when its prompt is complete."""

    parent: int  # slot
    slot: int
    request_id: int
    continuation: int


class Append(NamedTuple):
    """A table grows by a block."""

    slot: int
    block: int


class Copy(NamedTuple):
    """Entry `position` of a table changes from `source` to its copy `target`."""

    slot: int
    position: int
    source: int
    target: int


class Chunk(NamedTuple):
    """Prompt tokens of one slot."""

    slot: int
    start: int  # first position
    num_tokens: int
    samples: tuple[int, ...]  # slots that sample from the last row's logits; empty: no logits


class Step(NamedTuple):
    """All changes, in the order in which they apply."""

    id: int
    released: tuple[int, ...]
    started: tuple[Start, ...]
    forks: tuple[Fork, ...]
    appended: tuple[Append, ...]
    copies: tuple[Copy, ...]
    decodes: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows that the step computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def samples(self) -> tuple[int, ...]:
        """The slots that get a token, in the order of the tokens that complete the step."""
        return self.decodes + tuple(slot for chunk in self.chunks for slot in chunk.samples)

    def __str__(self) -> str:
        return "; ".join(_words(self))

    def to_ints(self) -> list[int]:
        """The step as whole numbers, for a broadcast; `from_ints` reads it back."""
        flat = [self.id]
        for start in self.started:
            flat += (*start[:4], len(start.tokens), len(start.blocks), *start.tokens, *start.blocks)
        for pairs in (self.forks, self.appended, self.copies):
            for pair in pairs:
                flat += pair
        for chunk in self.chunks:
            flat += (*chunk[:3], len(chunk.samples), *chunk.samples)
        sizes = [len(part) for part in self[1:]]
        return [*sizes, *flat, *self.released, *self.decodes]

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> Step:
        """The step that `to_ints` wrote."""
        sizes, rest = numbers[:7], iter(numbers[7:])
        step_id = next(rest)
        started = tuple(_read_start(rest) for _ in range(sizes[1]))
        forks = tuple(Fork(*_take(rest, 4)) for _ in range(sizes[2]))
        appended = tuple(Append(*_take(rest, 2)) for _ in range(sizes[3]))
        copies = tuple(Copy(*_take(rest, 4)) for _ in range(sizes[4]))
        chunks = tuple(_read_chunk(rest) for _ in range(sizes[6]))
        released, decodes = _take(rest, sizes[0]), _take(rest, sizes[5])
        return cls(step_id, released, started, forks, appended, copies, decodes, chunks)


class Took(NamedTuple):
    """What a step was and how long it ran, from its start on the first stage to its tokens."""

    num_decodes: int
    prompt_tokens: int
    seconds: float


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))


def _read_start(numbers: Iterator[int]) -> Start:
    slot, request_id, continuation, computed, num_tokens, num_blocks = _take(numbers, 6)
    tokens, blocks = _take(numbers, num_tokens), _take(numbers, num_blocks)
    return Start(slot, request_id, continuation, computed, tokens, blocks)


def _read_chunk(numbers: Iterator[int]) -> Chunk:
    slot, start, count, num_samples = _take(numbers, 4)
    return Chunk(slot, start, count, _take(numbers, num_samples))


def _words(step: Step) -> Iterator[str]:
    """`step 7; start 2=5.0 +32 of 40 in 3,4,9; decode 0-1; chunk 2 32+8 >2`."""
    yield f"step {step.id}"
    if step.released:
        yield f"release {_ranges(step.released)}"
    for s in step.started:
        total, blocks = s.computed + len(s.tokens), ",".join(map(str, s.blocks))
        yield f"start {s.slot}={s.request_id}.{s.continuation} +{s.computed} of {total} in {blocks}"
    for f in step.forks:
        yield f"fork {f.parent}>{f.slot}={f.request_id}.{f.continuation}"
    if step.appended:
        yield "append " + " ".join(f"{slot}+{block}" for slot, block in step.appended)
    for c in step.copies:
        yield f"copy {c.slot}[{c.position}] {c.source}>{c.target}"
    if step.decodes:
        yield f"decode {_ranges(step.decodes)}"
    for chunk in step.chunks:
        samples = f" >{_ranges(chunk.samples)}" if chunk.samples else ""
        yield f"chunk {chunk.slot} {chunk.start}+{chunk.num_tokens}{samples}"


def _ranges(slots: Sequence[int]) -> str:
    """Slots with runs drawn together: `0-3,7`."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
