"""How context parallelism divides a sequence, and which ranks then have to meet.

`ring` gives each rank two chunks, one early and one late: under a causal mask a late token attends
to more than an early one, and each pair of chunks together attends to the same number
(Megatron-LM context parallelism; domain.md section 3). With c ranks there are 2c chunks:

    chunk  0 1 2 3 4 5 6 7
    rank   0 1 2 3 3 2 1 0

`ulysses` sees whole sequences in attention, so its ranks hold plain parts in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from triptych.errors import Problem
from triptych.model.model import Attention, Model
from triptych.plan.layout import kv_head_range, query_head_range
from triptych.plan.plan import Plan


class Piece(NamedTuple):
    """Consecutive tokens: `start` to `stop` in their row, from `at` on among a rank's own."""

    at: int
    start: int
    stop: int


def pieces(length: int, size: int, index: int, method: str = "ring") -> tuple[Piece, ...]:
    """The tokens of one of `size` ranks, ascending; `length` divides as `sequence_unit` says."""
    if size == 1 or method == "ulysses":
        part = length // size
        return (Piece(0, index * part, (index + 1) * part),)
    chunk = length // (2 * size)
    late = 2 * size - 1 - index
    return (
        Piece(0, index * chunk, (index + 1) * chunk),
        Piece(chunk, late * chunk, (late + 1) * chunk),
    )


def sequence_unit(plan: Plan) -> int:
    """Rows are padded to a multiple of this, to divide over every stage's ranks."""
    split = plan.sequence_parallel
    units = (
        stage_unit(stage.context, stage.tensor if split else 1, plan.context_method)
        for stage in plan.stages
    )
    return math.lcm(*units)


def stage_unit(context: int, split: int, method: str) -> int:
    """What a row is a multiple of to divide over context ranks, and then into `split` parts."""
    chunks = 2 if context > 1 and method == "ring" else 1
    return split * context * chunks


class Reach(NamedTuple):
    """Keys that travel in a step of the ring: a rank's own tokens from `start` to `stop`."""

    step: int
    start: int
    stop: int


@lru_cache(maxsize=1024)
def ring_reaches(
    length: int, size: int, window: int | None = None, chunk: int | None = None
) -> tuple[Reach, ...]:
    """The steps in which some rank r sees keys of rank r - step, and all keys that are seen then.

    The same on every rank. With a window w a token sees itself and the w - 1 before it, so that
    only the ends of chunks travel, to the ranks whose chunks follow; where the attention has chunks
    of its own, what lies before a query's does not.
    """
    held = [pieces(length, size, index) for index in range(size)]

    def back(query: int) -> int:
        """How far a query sees; the first one of a piece sees furthest into another piece."""
        seen = length if window is None else window - 1
        return seen if chunk is None else min(seen, query % chunk)

    reaches = []
    for step in range(1, size):
        seen = [
            (
                keys.at + max(0, queries.start - back(queries.start) - keys.start),
                keys.at + keys.stop - keys.start,
            )
            for index in range(size)
            for queries in held[index]
            for keys in held[(index - step) % size]
            if keys.start < queries.start < keys.stop + back(queries.start)
        ]
        if seen:
            starts, stops = zip(*seen, strict=True)
            reaches.append(Reach(step, min(starts), max(stops)))
    return tuple(reaches)


def heads_problems(plan: Plan, model: Model) -> Iterator[Problem]:
    """The heads that Ulysses cannot deal to the context ranks, with degrees that it can."""
    if plan.context_method != "ulysses":
        return
    for tensor, context in sorted({(stage.tensor, stage.context) for stage in plan.stages}):
        for attention in dict.fromkeys(block.attention for block in model.blocks):
            if not divides_heads(attention, tensor, context):
                counts = range(1, attention.query_heads + 1)
                usable = [c for c in counts if divides_heads(attention, tensor, c)]
                heads = f"{attention.query_heads} query heads and {attention.kv_heads} KV heads"
                yield Problem(
                    f"context_method=ulysses with cp={context} and tp={tensor} for {heads}",
                    "Ulysses deals the heads of each tensor rank to the context ranks: query heads "
                    "evenly, and KV heads evenly or each to as many ranks",
                    f"context_method=ring, or cp in {', '.join(map(str, usable))}",
                )


def divides_heads(attention: Attention, tensor: int, context: int) -> bool:
    """True if Ulysses can deal the heads of every tensor rank to `context` ranks.

    Query heads evenly, and so KV heads; fewer KV heads than ranks are repeated.
    """
    for rank in range(tensor):
        bounds = (held(attention, tensor, rank) for held in (query_head_range, kv_head_range))
        query, kv = (stop - start for start, stop in bounds)
        if query % context or (kv % context and context % kv):
            return False
    return True
