"""Rewrites of programs: the one place where sends and receives come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from triptych.schedule.action import COMPUTE, Action, Kind
from triptych.schedule.program import Program


def with_communication(program: Program) -> Program:
    """The program with each message written out.

    A RECV stands just before the compute that needs it, a SEND just after the compute that
    produces it; stages on the same rank hand over without a message. Sends and receives that
    were there before are replaced.
    """
    rows = tuple(tuple(_row(program, rank)) for rank in range(program.num_ranks))
    return replace(program, actions=rows)


def without_communication(program: Program) -> Program:
    """The program's compute actions alone."""
    rows = tuple(
        tuple(action for action in row if action.kind in COMPUTE) for row in program.actions
    )
    return replace(program, actions=rows)


def has_communication(program: Program) -> bool:
    """True if any action is a send or a receive."""
    return any(action.kind not in COMPUTE for row in program.actions for action in row)


def source_stage(program: Program, action: Action) -> int | None:
    """The stage that a compute action gets its input from; None at the ends of the model."""
    match action.kind:
        case Kind.F:
            return action.stage - 1 if action.stage > 0 else None
        case Kind.B | Kind.I:
            return action.stage + 1 if action.stage + 1 < program.num_stages else None
        case _:
            return None


def target_stage(program: Program, action: Action) -> int | None:
    """The stage that needs a compute action's output; None at the ends of the model."""
    match action.kind:
        case Kind.F:
            return action.stage + 1 if action.stage + 1 < program.num_stages else None
        case Kind.B | Kind.I:
            return action.stage - 1 if action.stage > 0 else None
        case _:
            return None


def peer_stage(action: Action) -> int:
    """The stage at the other end of a send or receive."""
    forward_neighbour = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return action.stage + 1 if forward_neighbour else action.stage - 1


def messages(program: Program, action: Action) -> tuple[Action | None, Action | None]:
    """The receive that a compute action needs before it, and the send that it needs after it."""
    rank = program.placement[action.stage]
    is_forward = action.kind is Kind.F
    source, target = source_stage(program, action), target_stage(program, action)
    receive = send = None
    if source is not None and program.placement[source] != rank:
        kind = Kind.RECV_F if is_forward else Kind.RECV_B
        receive = Action(action.stage, kind, action.microbatch)
    if target is not None and program.placement[target] != rank:
        kind = Kind.SEND_F if is_forward else Kind.SEND_B
        send = Action(action.stage, kind, action.microbatch)
    return receive, send


def _row(program: Program, rank: int) -> Iterator[Action]:
    for action in program.actions[rank]:
        if action.kind not in COMPUTE:
            continue
        receive, send = messages(program, action)
        if receive is not None:
            yield receive
        yield action
        if send is not None:
            yield send
