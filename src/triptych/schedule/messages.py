"""Messages of a program: which ones its compute actions need, and between which stages."""

from __future__ import annotations

from dataclasses import replace

from triptych.schedule.action import COMPUTE, Action, Kind
from triptych.schedule.program import Program


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


_PARTNERS = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


def partner(action: Action) -> Action:
    """The receive that takes a send, or the send that feeds a receive."""
    return Action(peer_stage(action), _PARTNERS[action.kind], action.microbatch)
