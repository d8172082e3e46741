"""Is a program legal? Every broken rule at once, and freedom from deadlock.

Rules: each stage has one forward and one backward (or its two halves I and W) of every
micro-batch, each after what it depends on; each message is sent once and received once, in the
same order on both sides; the ranks come to their end when no send is buffered (see `deadlock`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from triptych.errors import Problem, ScheduleError
from triptych.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from triptych.schedule.deadlock import Channel, channel_of, find_deadlock
from triptych.schedule.excerpt import excerpt
from triptych.schedule.messages import (
    has_communication,
    messages,
    partner,
    peer_stage,
    source_stage,
)
from triptych.schedule.passes import with_communication
from triptych.schedule.program import Program

_SHOWN = 12


def check(program: Program) -> None:
    """Returns if the program is legal; a program without messages is judged with them inserted.

    Raises ScheduleError listing all faults; deadlock is looked for once the rest is sound.
    """
    if faults := list(_misplaced(program)):
        raise ScheduleError(_capped(faults))
    complete = program if has_communication(program) else with_communication(program)
    faults = [*_wrong_counts(program), *_wrong_order(complete), *_wrong_messages(complete)]
    faults = faults or list(_wrong_channel_order(complete)) or list(_deadlock(complete))
    if faults:
        raise ScheduleError(_capped(faults))


def _capped(faults: list[Problem]) -> list[Problem]:
    more = len(faults) - _SHOWN
    return faults if more <= 0 else [*faults[:_SHOWN], Problem(f"and {more} more faults")]


def _misplaced(program: Program) -> Iterator[Problem]:
    """Ranks, stages and micro-batches that do not exist, or actions on the wrong rank."""
    for stage, rank in enumerate(program.placement):
        if rank >= program.num_ranks:
            yield Problem(
                f"stage {stage} is placed on rank {rank}", f"ranks are 0 to {program.num_ranks - 1}"
            )
    for rank, row in enumerate(program.actions):
        for action in row:
            if fault := _misplacement(program, rank, action):
                yield Problem(f"rank {rank}: {action}", fault)


def _misplacement(program: Program, rank: int, action: Action) -> str | None:
    if action.stage >= program.num_stages:
        return f"stages are 0 to {program.num_stages - 1}"
    if program.placement[action.stage] != rank:
        return f"stage {action.stage} is placed on rank {program.placement[action.stage]}"
    if action.microbatch >= program.num_microbatches:
        return f"micro-batches are 0 to {program.num_microbatches - 1}"
    if action.kind not in COMPUTE:
        peer = peer_stage(action)
        if not 0 <= peer < program.num_stages:
            return "there is no stage at the other end"
        if program.placement[peer] == rank:
            return f"stages {action.stage} and {peer} share the rank: no message"
    return None


def _wrong_counts(program: Program) -> Iterator[Problem]:
    """Missing or repeated compute."""
    counts = Counter(action for row in program.actions for action in row)
    for stage in range(program.num_stages):
        for index in range(program.num_microbatches):
            done = {
                kind: counts[Action(stage, kind, index)]
                for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            }
            if done[Kind.F] != 1:
                rule = "each stage has one F of each micro-batch"
                yield Problem(f"{done[Kind.F]} times {stage}F{index}", rule)
            backward = (done[Kind.B], done[Kind.I], done[Kind.W])
            if backward not in ((1, 0, 0), (0, 1, 1)):
                yield Problem(
                    f"stage {stage}, micro-batch {index}: B, I, W occur {backward} times",
                    "each stage has one B, or one I and one W, of each micro-batch",
                )


def _wrong_order(program: Program) -> Iterator[Problem]:
    """Compute, sends and receives that stand before what they need on the same rank."""
    for rank, row in enumerate(program.actions):
        place = {action: position for position, action in enumerate(row)}
        for position, action in enumerate(row):
            for need in _needs(program, action):
                if place.get(need, position) > position:
                    shown = excerpt(program, {rank: (position, f"needs {need}")})
                    yield Problem(
                        f"{action} stands before {need}\n    {shown}", _order_rule(action)
                    )


def _needs(program: Program, action: Action) -> list[Action]:
    """Actions that come before this one where they exist on the same rank."""
    stage, index = action.stage, action.microbatch
    match action.kind:
        case Kind.W:
            return [Action(stage, Kind.I, index)]
        case Kind.SEND_F:
            return [Action(stage, Kind.F, index)]
        case Kind.SEND_B:
            return [Action(stage, Kind.B, index), Action(stage, Kind.I, index)]
        case Kind.F | Kind.B | Kind.I:
            return _compute_needs(program, action)
        case _:
            return []


def _compute_needs(program: Program, action: Action) -> list[Action]:
    is_forward = action.kind is Kind.F
    needs = [] if is_forward else [Action(action.stage, Kind.F, action.microbatch)]
    receive, _ = messages(program, action)
    source = source_stage(program, action)
    if receive is not None:
        needs.append(receive)
    elif source is not None:
        kinds = (Kind.F,) if is_forward else (Kind.B, Kind.I)
        needs += [Action(source, kind, action.microbatch) for kind in kinds]
    return needs


def _order_rule(action: Action) -> str:
    match action.kind:
        case Kind.F:
            return "F follows F of the stage before"
        case Kind.B | Kind.I:
            return "a backward follows its forward and the backward of the stage after"
        case Kind.W:
            return "W follows I"
        case _:
            return "a SEND follows the compute that produces it"


def _wrong_messages(program: Program) -> Iterator[Problem]:
    """Messages that a compute action lacks, repeated ones, ends without a partner."""
    counts = Counter(action for row in program.actions for action in row)
    expected = {
        message
        for action in counts
        if action.kind in COMPUTE
        for message in messages(program, action)
        if message is not None
    }
    for message in sorted(expected - counts.keys(), key=str):
        yield Problem(f"{message} is missing", f"it pairs with {partner(message)}")
    for message, count in counts.items():
        if message.kind in COMPUTE:
            continue
        if count > 1:
            yield Problem(f"{count} times {message}", "a message is sent and received once")
        if message not in expected:
            yield Problem(f"{message} belongs to no compute", "a message has a compute at each end")


def _wrong_channel_order(program: Program) -> Iterator[Problem]:
    """Channels whose two sides disagree about the order of messages."""
    sent: defaultdict[Channel, list[Action]] = defaultdict(list)
    received: defaultdict[Channel, list[Action]] = defaultdict(list)
    for row in program.actions:
        for action in row:
            if action.kind in SENDS:
                sent[channel_of(program, action)].append(action)
            elif action.kind in RECEIVES:
                received[channel_of(program, action)].append(partner(action))
    for channel, sends in sent.items():
        for number, (send, wanted) in enumerate(zip(sends, received[channel], strict=True)):
            if send != wanted:
                arrows = _both_ends(program, channel, send, partner(wanted), number)
                yield Problem(
                    f"rank {channel.sender} sends {send} where rank {channel.receiver} receives "
                    f"{partner(wanted)}\n" + _indented(arrows),
                    "both sides of a channel have the same order of messages",
                )
                break


def _both_ends(
    program: Program, channel: Channel, send: Action, receive: Action, number: int
) -> str:
    remark = f"message {number} of the channel"
    return excerpt(
        program,
        {
            channel.sender: (program.actions[channel.sender].index(send), remark),
            channel.receiver: (program.actions[channel.receiver].index(receive), remark),
        },
    )


def _deadlock(program: Program) -> Iterator[Problem]:
    waits = find_deadlock(program)
    if waits:
        arrows = {rank: (wait.position, wait.reason) for rank, wait in waits.items()}
        yield Problem(
            f"deadlock: ranks {', '.join(map(str, waits))} wait for each other\n"
            + _indented(excerpt(program, arrows)),
            "a send is complete only when its receive is posted (sends are not buffered)",
        )


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
