"""DualPipe-V: both directions of a V at once (DeepSeek's DualPipe, cut in half; DualPipe README).

Its point on GPUs is that the F of one chunk and the B of the other, neighbours in the program, run
at the same time, the communication of one behind the arithmetic of the other. Here they are two
actions, one after the other.
"""

from __future__ import annotations

from triptych.schedule.action import Action
from triptych.schedule.zero_bubble import Counters

Row = list[Action]


def dualpipe_v(num_ranks: int, num_microbatches: int) -> list[Row]:
    """Eight steps a rank; needs m >= 2p. Rank r runs stages r and 2p-1-r, chunks 0 and 1.

    1. 2(p-r-1) x F0               5. (p-r-1) x {B1, F1 B0}
    2. (r+1) x {F0, F1}            6. (r+1) x {B1, B0}, the second half of them as I
    3. (p-r-1) x {I1, W, F1}       7. (p-r-1) x {W, I0}
    4. (m-2p+r+1) x {F0 B1, F1 B0} 8. (r+1) x W

    W takes the oldest one that is due. 2p+1 chunks of half a rank's layers are alive.
    """
    return [_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    zero, one = Counters(rank), Counters(2 * num_ranks - 1 - rank)
    before_turn, from_turn = num_ranks - rank - 1, rank + 1
    row = [zero.forward() for _ in range(2 * before_turn)]
    for _ in range(from_turn):
        row += (zero.forward(), one.forward())
    for _ in range(before_turn):
        row += (one.input(), one.weight(), one.forward())
    for _ in range(num_microbatches - 2 * num_ranks + from_turn):
        row += (zero.forward(), one.backward(), one.forward(), zero.backward())
    for _ in range(before_turn):
        row += (one.backward(), one.forward(), zero.backward())
    return row + _end(zero, one, before_turn, from_turn)


def _end(zero: Counters, one: Counters, before_turn: int, from_turn: int) -> Row:
    """Steps 6 to 8: W is put off where a neighbour waits for I."""
    row: Row = []
    due: list[Counters] = []
    for index in range(2 * from_turn):
        chunk = zero if index % 2 else one
        if index < from_turn:
            row.append(chunk.backward())
        else:
            row.append(chunk.input())
            due.append(chunk)
    for _ in range(before_turn):
        row += (due.pop(0).weight(), zero.input())
        due.append(zero)
    return row + [chunk.weight() for chunk in due]
