"""Several stages a rank in a loop, full backwards: interleaved 1F1B and breadth-first.

Chunk c of rank r is stage c*p + r, so a micro-batch goes round the ranks once per chunk. Messages
are v times as many; the bubble is v times shorter.
"""

from __future__ import annotations

from triptych.schedule.action import Action, Kind

Row = list[Action]


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> list[Row]:
    """1F1B over (chunk, micro-batch) pairs (Narayanan et al. 2021, sec. 2.2).

        rank 0: F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 ...        micro-batch.chunk, p = 2
        rank 1:      F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 ...

    Micro-batches go in groups of p: a group passes chunk 0, then chunk 1, ...; backwards follow
    the same order with the chunks reversed. Rank r warms up with 2(p-1-r) + (v-1)N forwards, N the
    size of a group. If p does not divide m, there are m // p groups (at least one), as equal as
    can be: every group but a lone one still has p micro-batches or more, which is what keeps
    each input ahead of its use.

    Bubble (p-1)(F+B)/v where p divides m, F and B those of all chunks of a rank.
    """
    pairs = _grouped(num_ranks, num_microbatches, chunks)
    group = max(_group_sizes(num_ranks, num_microbatches))
    rows = []
    for rank in range(num_ranks):
        warmup = min(len(pairs), 2 * (num_ranks - 1 - rank) + (chunks - 1) * group)
        forwards = [Action(c * num_ranks + rank, Kind.F, index) for c, index in pairs]
        backwards = [
            Action((chunks - 1 - c) * num_ranks + rank, Kind.B, index) for c, index in pairs
        ]
        rows.append(_alternating(forwards, backwards, warmup))
    return rows


def _group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Sizes of the groups, the larger first: 9 micro-batches on 4 ranks -> 5, 4."""
    groups = max(1, num_microbatches // num_ranks)
    quotient, rest = divmod(num_microbatches, groups)
    return [quotient + (index < rest) for index in range(groups)]


def _grouped(num_ranks: int, num_microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) pairs in the order of forwards."""
    pairs: list[tuple[int, int]] = []
    start = 0
    for size in _group_sizes(num_ranks, num_microbatches):
        group = range(start, start + size)
        pairs += [(chunk, index) for chunk in range(chunks) for index in group]
        start += size
    return pairs


def _alternating(forwards: Row, backwards: Row, warmup: int) -> Row:
    """`warmup` forwards, then one forward and one backward each, then the other backwards."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    return row + backwards[len(forwards) - warmup :]


def breadth_first(num_ranks: int, num_microbatches: int, chunks: int) -> list[Row]:
    """All micro-batches through a chunk before the next chunk (Lamy-Poirier 2022).

        rank 0: F0.0 F1.0 F0.1 F1.1           B1.1 B0.1 B1.0 B0.0      micro-batch.chunk, p = 2
        rank 1:      F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0

    Bubble (p-1)(F+B)/v if m >= p; every rank keeps all m micro-batches of all chunks. The
    parameters of a chunk are in use once per pass, so ZeRO-3 gathers them once.
    """
    order = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [Action(stage, Kind.F, index) for stage in stages for index in order]
        backwards = [Action(a.stage, Kind.B, a.microbatch) for a in reversed(forwards)]
        rows.append(forwards + backwards)
    return rows
