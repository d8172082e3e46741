"""Does a program with sends and receives come to its end when no send is buffered?

The model, which NCCL obeys and gloo is kinder than:

* a channel is (sender rank, receiver rank, direction); its messages arrive in order;
* a send is issued and the rank goes on, but it completes only when its receive is posted;
  before the next send on the same channel the rank waits until the last one is complete;
* a receive holds the rank until its message was sent;
* at the end of the step every send is complete.

With `sends_block`, a send holds the rank as well: what happens under plain blocking calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from triptych.schedule.action import RECEIVES, SENDS, Action, Kind
from triptych.schedule.passes import peer_stage
from triptych.schedule.program import Program


class Channel(NamedTuple):
    """An ordered stream of messages between two ranks."""

    sender: int
    receiver: int
    direction: str  # "F": activations, "B": activation gradients


class Wait(NamedTuple):
    """A rank that cannot go on."""

    position: int  # index in the rank's actions; their count when the rank waits at its end
    reason: str


@dataclass(slots=True)
class _Traffic:
    """What has happened on a channel so far."""

    issued: int = 0
    posted: int = 0

    @property
    def all_received(self) -> bool:
        return self.posted >= self.issued


def channel_of(program: Program, action: Action) -> Channel:
    """The channel that a send or receive belongs to."""
    own, peer = program.placement[action.stage], program.placement[peer_stage(action)]
    direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
    return Channel(own, peer, direction) if action.kind in SENDS else Channel(peer, own, direction)


def partner(action: Action) -> Action:
    """The receive that takes a send, or the send that feeds a receive."""
    kinds = {
        Kind.SEND_F: Kind.RECV_F,
        Kind.RECV_F: Kind.SEND_F,
        Kind.SEND_B: Kind.RECV_B,
        Kind.RECV_B: Kind.SEND_B,
    }
    return Action(peer_stage(action), kinds[action.kind], action.microbatch)


def find_deadlock(program: Program, *, sends_block: bool = False) -> dict[int, Wait]:
    """The ranks that can never go on, by rank; empty if the program comes to its end.

    Messages are taken to be the same, in the same order, on both sides of each channel.
    """
    traffic: defaultdict[Channel, _Traffic] = defaultdict(_Traffic)
    running = {rank: _run(program, rank, traffic, sends_block) for rank in range(program.num_ranks)}
    before = -1
    waits: dict[int, Wait] = {}
    while running and (now := sum(t.issued + t.posted for t in traffic.values())) != before:
        before = now
        waits = {rank: wait for rank, run in running.items() if (wait := next(run, None))}
        running = {rank: running[rank] for rank in waits}
    return waits


def _run(
    program: Program, rank: int, traffic: defaultdict[Channel, _Traffic], sends_block: bool
) -> Iterator[Wait]:
    """Executes a rank's row; yields each time the rank has to wait."""
    last_sends: dict[Channel, Action] = {}
    row = program.actions[rank]
    for position, action in enumerate(row):
        if action.kind in SENDS:
            channel = channel_of(program, action)
            while not traffic[channel].all_received:
                yield Wait(position, _not_received(channel, last_sends[channel]))
            traffic[channel].issued += 1
            last_sends[channel] = action
            while sends_block and not traffic[channel].all_received:
                yield Wait(position, _not_received(channel, action))
        elif action.kind in RECEIVES:
            channel = channel_of(program, action)
            traffic[channel].posted += 1
            while traffic[channel].issued < traffic[channel].posted:
                yield Wait(position, f"waits for {partner(action)} of rank {channel.sender}")
    for channel, action in last_sends.items():
        while not traffic[channel].all_received:
            yield Wait(len(row), _not_received(channel, action))


def _not_received(channel: Channel, send: Action) -> str:
    return f"waits for {partner(send)} of rank {channel.receiver} to take {send}"
