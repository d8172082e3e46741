"""Rewrites of programs: the one place where sends and receives come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from triptych.errors import ScheduleError
from triptych.schedule.action import Action, Kind
from triptych.schedule.messages import has_communication, messages, partner, without_communication
from triptych.schedule.program import Program
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Span

__all__ = [
    "has_communication",
    "with_communication",
    "without_communication",
    "without_frozen",
]

_UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def with_communication(program: Program) -> Program:
    """The program with each message written out; what was written out before is replaced.

    A SEND stands just after the compute that produces it. A RECV stands where the message is sent,
    by a clock on which F, I and W take one unit and B two: so it is posted while its rank still
    computes something else. Stages on the same rank hand over without a message.

    Sends and receives of a rank thus stand in the order of that clock (ties: of stage and
    micro-batch), which is one order for the messages of all ranks. Take the first message that is
    not complete: what its two ranks do before it needs earlier messages only, and in whatever
    queues it stands there are none but later ones behind it. So it completes: no deadlock, with
    no send buffered, however ranks share their communicators, and even if every call blocks.

    A program that never ends has its receives just before the compute that needs them.
    """
    bare = without_communication(program)
    try:
        timeline = simulate(bare, lambda action: _UNITS[action.kind])
    except ScheduleError:
        rows = [list(_late(bare, row)) for row in bare.actions]
    else:
        rows = _by_the_clock(bare, {span.label: span for span in timeline.spans})
    return replace(program, actions=tuple(map(tuple, rows)))


def without_frozen(row: Sequence[Action], lowest: int) -> tuple[Action, ...]:
    """A rank's actions if stage `lowest` is the first with something to train.

    Stages below have no backward, and no gradient travels down to them: both ends of each message
    leave it out, so that those that remain stand as they stood.
    """
    first = {Kind.SEND_B: lowest + 1} | dict.fromkeys((Kind.B, Kind.I, Kind.W, Kind.RECV_B), lowest)
    return tuple(action for action in row if action.stage >= first.get(action.kind, 0))


def _late(program: Program, row: tuple[Action, ...]) -> Iterator[Action]:
    """A row with each receive just before, and each send just after, its compute."""
    for action in row:
        receive, send = messages(program, action)
        yield from (receive,) if receive else ()
        yield action
        yield from (send,) if send else ()


_Time = tuple[float, int, int, int]
"""Clock, then which message of those sent at once, and last whether it is a compute action."""


def _by_the_clock(program: Program, spans: dict[str, Span]) -> list[list[Action]]:
    """Rows in which messages stand in the order in which they are sent."""
    timed: list[list[tuple[_Time, Action]]] = [[] for _ in program.actions]
    for rank, row in enumerate(program.actions):
        for position, action in enumerate(row):
            start_s = spans[str(action)].start_s
            timed[rank].append(((start_s, len(spans), position, 1), action))
            _, send = messages(program, action)
            if send is not None:
                receive = partner(send)
                at = (spans[str(action)].end_s, send.stage, send.microbatch, 0)
                timed[rank].append((at, send))
                timed[program.placement[receive.stage]].append((at, receive))
    return [[action for _, action in sorted(row, key=lambda entry: entry[0])] for row in timed]
