"""When each rank ends a program: `schedule.simulate` without spans, for searches.

The same rules, several times faster: an action starts when its rank is free and its input is
there; a message between ranks takes `hop_s`.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cost.pipeline import Pair
from triptych.schedule.action import Kind
from triptych.schedule.program import Program

_Key = tuple[bool, int, int]
"""An input: (is a forward's, the stage that needs it, micro-batch)."""


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
    ends_s = [0.0] * program.num_ranks
    position = [0] * program.num_ranks
    ready_s: dict[_Key, float] = {}
    waiting: dict[_Key, int] = {}
    runnable = list(range(program.num_ranks))
    last = program.num_stages - 1
    while runnable:
        rank = runnable.pop()
        row, now_s = program.actions[rank], ends_s[rank]
        for index in range(position[rank], len(row)):
            action = row[index]
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            forward_s, backward_s = stages[stage]
            is_forward = kind is Kind.F
            if kind is not Kind.W and stage != (0 if is_forward else last):
                needed = (is_forward, stage, microbatch)
                at_s = ready_s.get(needed)
                if at_s is None:
                    waiting[needed] = rank
                    position[rank] = index
                    break
                now_s = max(now_s, at_s)
            if is_forward:
                now_s += forward_s
            elif kind is Kind.B:
                now_s += backward_s
            else:
                now_s += halves[stage][kind is Kind.W]
            target = stage + 1 if is_forward else stage - 1
            if kind is not Kind.W and 0 <= target <= last:
                produced = (is_forward, target, microbatch)
                travels = program.placement[target] != rank
                ready_s[produced] = now_s + hop_s if travels else now_s
                if produced in waiting:
                    runnable.append(waiting.pop(produced))
        ends_s[rank] = now_s
    return ends_s
