"""Where a program looks back at the optimizer step before it (Qi et al. 2024, sec. 4).

Under ZB-H2 and ZB-V no rank idles between its first and its last action, but ranks begin and end
up to (p-1) F apart. The norm of all gradients is known when the last rank has ended. By then the
first rank has run p-1 forwards of the next step, and none of them had to wait.
"""

from __future__ import annotations

from itertools import takewhile

from triptych.schedule.action import COMPUTE, SENDS, Action, Kind
from triptych.schedule.messages import partner
from triptych.schedule.program import Program
from triptych.schedule.simulate import simulate


def validation_points(program: Program) -> tuple[int, ...]:
    """How many actions each rank runs ahead of the norm: those before the last rank begins.

    What lies before these points is forwards and their messages, and closed: a message that is sent
    there is received there. So all ranks together can forget it and run it again.
    """
    spans = {span.label: span for span in simulate(program, lambda _: 1.0).spans}
    begins_s = [
        min(span.start_s for span in spans.values() if span.rank == rank)
        for rank in range(program.num_ranks)
    ]

    def is_before(action: Action) -> bool:
        if action.kind in COMPUTE:
            return spans[str(action)].start_s < max(begins_s)
        send = action if action.kind in SENDS else partner(action)
        made = Action(send.stage, Kind.F, send.microbatch)
        return send.kind is Kind.SEND_F and spans[str(made)].end_s < max(begins_s)

    return tuple(len(list(takewhile(is_before, row))) for row in program.actions)
