"""Zero-bubble schedules by hand: ZB-H1, ZB-H2, ZB-V (Qi et al. 2024, 2401.10241, sec. 2 and 6).

A backward is two actions: I makes the gradient of the input, which the stage before waits for; W
makes the gradients of the weights, which nobody waits for before the optimizer. W fills what would
be bubbles.

Clipping without a barrier. In ZB-H2 and ZB-V no rank idles between its first and last action, but
ranks end their steps up to (p-1) F apart. A global gradient norm or a check for infinities before
the optimizer would make all ranks meet, and the skew would become a bubble again. The way out is
to validate afterwards (sec. 4):

1. Each rank starts the sum of all parts of the norm and goes on to its optimizer at once, as if
   nothing will be clipped. It keeps what the update changes.
2. It goes on with the forwards of the next step. Where the last rank begins (`validation.py`) all
   of them have started the sum, and look at it. If the norm asks for no clipping, nothing is left
   to do. Otherwise each rank puts back what it kept, updates with the clipped gradients, and runs
   those forwards again, p-1 at most.

So the result is the one of a synchronous step, bit by bit (`runtime/data/validation.py`). A step
that is followed by a barrier (an evaluation, a checkpoint, a loss that is read at once) costs the
(p-1) F of skew.
"""

from __future__ import annotations

from triptych.schedule.action import Action, Kind

Row = list[Action]


def zb_h1(num_stages: int, num_microbatches: int) -> list[Row]:
    """1F1B's memory, a third of its bubble: (p-1)(F+I-W).

        rank 0: F0 F1    I0 W0 F2 I1 W1 I2 W2
        rank 1:    F0 I0 F1 I1 W0 F2 I2 W1 W2

    Rank r delays each W by p-1 micro-batches, so that all ranks hold min(m, p) from F to W.
    """
    last = num_stages - 1
    return [_delayed(stage, num_microbatches, last - stage, last) for stage in range(num_stages)]


def zb_h2(num_stages: int, num_microbatches: int) -> list[Row]:
    """No bubble inside a rank's span if F = I = W; in general (p-1)(F+I-2W).

        rank 0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1:    F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Nearly twice the memory of 1F1B: 2p-1 micro-batches from F to W. Needs m >= 2p-1.
    """
    last = num_stages - 1
    return [
        _delayed(stage, num_microbatches, 2 * (last - stage), 2 * last)
        for stage in range(num_stages)
    ]


def _delayed(stage: int, num_microbatches: int, inputs: int, weights: int) -> Row:
    """F(x), I(x - inputs), W(x - weights) for x = 0, 1, ..., leaving out what does not exist."""
    delays = ((Kind.F, 0), (Kind.I, inputs), (Kind.W, weights))
    return [
        Action(stage, kind, x - delay)
        for x in range(num_microbatches + weights)
        for kind, delay in delays
        if 0 <= x - delay < num_microbatches
    ]


def zb_v(num_ranks: int, num_microbatches: int) -> list[Row]:
    """Two stages a rank in a V: no bubble inside a rank's span if F = I = W, in 1F1B's memory.

    Rank r runs stages r and 2p-1-r, so the last stage is on rank 0 and its backward starts where
    the forward came from. 2p chunks of half a rank's layers are alive on each rank.

    The order is that of max(m, 2p-1) micro-batches, without those that do not exist.
    """
    rows = [_zb_v_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return [[action for action in row if action.microbatch < num_microbatches] for row in rows]


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    count = max(num_microbatches, 2 * num_ranks - 1)
    there, back = Counters(rank), Counters(2 * num_ranks - 1 - rank)
    row = [there.forward() for _ in range(2 * (num_ranks - rank) - 1)]
    for _ in range(rank):
        row += (back.forward(), there.forward())
    for _ in range(num_ranks - rank):
        row += (back.forward(), back.input(), back.weight())
    while back.done(Kind.F) < count:
        row += (there.forward(),) if there.done(Kind.F) < count else ()
        row += (there.input(), there.weight(), back.forward(), back.input(), back.weight())
    for _ in range(rank):
        row += (there.input(), back.input())
    for _ in range(num_ranks - rank):
        row += (there.input(), there.weight())
    row += [back.weight() for _ in range(count - back.done(Kind.W))]
    return row + [there.weight() for _ in range(count - there.done(Kind.W))]


class Counters:
    """The next action of each kind of one stage; micro-batches go in order."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._done = {kind: 0 for kind in (Kind.F, Kind.I, Kind.W)}

    def done(self, kind: Kind) -> int:
        """How many there were of a kind; a full backward counts as I and as W."""
        return self._done[kind]

    def forward(self) -> Action:
        """The next F."""
        return self._next(Kind.F)

    def input(self) -> Action:
        """The next I."""
        return self._next(Kind.I)

    def weight(self) -> Action:
        """The next W."""
        return self._next(Kind.W)

    def backward(self) -> Action:
        """The next full backward, if no W is due."""
        assert self._done[Kind.I] == self._done[Kind.W], "a W is due"
        self._next(Kind.W)
        return Action(self._stage, Kind.B, self._next(Kind.I).microbatch)

    def _next(self, kind: Kind) -> Action:
        action = Action(self._stage, kind, self._done[kind])
        self._done[kind] += 1
        return action
