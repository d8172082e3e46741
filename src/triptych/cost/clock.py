"""When each rank ends a program: `schedule.simulate` without spans, for searches.

The same rules, several times faster: an action starts when its rank is free and its input is
there; a message between ranks takes `hop_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from triptych.cost.pipeline import Pair
from triptych.schedule.action import Kind
from triptych.schedule.program import Program

_NOT_YET = -1.0


def rank_ends_s(
    program: Program,
    stages: Sequence[Pair],
    hop_s: float,
    halves: Sequence[Pair] | None = None,
) -> list[float]:
    """The end of each rank's last action; `program` holds compute actions only and is legal.

    `halves` are the seconds of I and of W of each stage (absent: half of its backward each).
    """
    halves = halves or [(backward_s / 2.0, backward_s / 2.0) for _, backward_s in stages]
    count, placement, num_stages = program.num_microbatches, program.placement, program.num_stages
    hops_s = [0.0 if a == b else hop_s for a, b in pairwise(placement)]
    forth_s, back_s = [*hops_s, 0.0], [0.0, *hops_s]
    ready_s = _inputs(num_stages, count)
    first_back = (num_stages + 2) * count
    ends_s = [0.0] * program.num_ranks
    position = [0] * program.num_ranks
    waiting: dict[int, int] = {}
    runnable = list(range(program.num_ranks))
    forward, backward, weight = Kind.F, Kind.B, Kind.W
    while runnable:
        rank = runnable.pop()
        row, now_s = program.actions[rank], ends_s[rank]
        for index in range(position[rank], len(row)):
            action = row[index]
            stage, kind = action.stage, action.kind
            if kind is weight:
                now_s += halves[stage][1]
                continue
            needed = stage * count + action.microbatch
            if kind is not forward:
                needed += first_back
            at_s = ready_s[needed]
            if at_s == _NOT_YET:
                waiting[needed] = rank
                position[rank] = index
                break
            if at_s > now_s:
                now_s = at_s
            if kind is forward:
                now_s += stages[stage][0]
                produced, sent_s = needed + count, forth_s[stage]
            else:
                now_s += stages[stage][1] if kind is backward else halves[stage][0]
                produced, sent_s = needed - count, back_s[stage]
            ready_s[produced] = now_s + sent_s
            if produced in waiting:
                runnable.append(waiting.pop(produced))
        ends_s[rank] = now_s
    return ends_s


def _inputs(num_stages: int, num_microbatches: int) -> list[float]:
    """When the inputs of actions are there, a row of micro-batches for each: of the forward of
    each stage, and of none; of none, and of the backward of each stage. The first stage's forwards
    and the last one's backwards wait for nothing.
    """
    there, later = [0.0] * num_microbatches, [_NOT_YET] * num_microbatches
    return there + later * (2 * num_stages) + there
