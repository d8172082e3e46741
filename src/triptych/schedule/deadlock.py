"""Does a program with sends and receives come to its end when no send is buffered?

The model, which NCCL obeys and gloo is kinder than:

* a send or receive is issued and the rank goes on; it joins a queue of its rank;
* the first of a queue completes together with its partner, when that is the first of a queue of
  the other rank; those behind it wait, on both sides;
* a computation waits until the receive of its input is complete;
* at the end of the step everything is complete.

Which messages share a queue depends on the communicators. `queues` says it: those of one "channel"
(sender, receiver, direction), if communicators are made per pair of ranks; those of one "group",
activations or gradients to higher or to lower ranks, whoever the neighbour, as NCCL has it when a
group is made eagerly; or all of a "rank". A program that ends with fewer queues ends with more.

A message between stages that divide their hidden states differently is a batch of messages, to all
ranks that need a part; both stages issue theirs at the same places of their rows, so that it
completes as one message does (`runtime/pipeline/channels.py`).

Collectives of other axes change nothing. A rank's row depends on its pipeline coordinate alone, so
the ranks of a tensor, context or expert group run the same row, and meet in each F, B and I in the
same order; the ranks of a data group also end their stages in the same order. Take a run of one
pipeline that ends and let all pipelines of the group take each of its steps together: nobody ever
waits in a collective for a rank that waits for something else.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from triptych.schedule.action import COMPUTE, SENDS, Action, Kind
from triptych.schedule.messages import messages, partner, peer_stage
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


def channel_of(program: Program, action: Action) -> Channel:
    """The channel that a send or receive belongs to."""
    own, peer = program.placement[action.stage], program.placement[peer_stage(action)]
    direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
    return Channel(own, peer, direction) if action.kind in SENDS else Channel(peer, own, direction)


def channels(program: Program) -> tuple[Channel, ...]:
    """The channels that a program uses, in order: what a runtime warms before the first step."""
    found = set()
    for stage in range(1, program.num_stages):
        before, after = program.placement[stage - 1], program.placement[stage]
        if before != after:
            found |= {Channel(before, after, "F"), Channel(after, before, "B")}
    return tuple(sorted(found))


Queues = Literal["channel", "group", "rank"]


def find_deadlock(
    program: Program, *, blocking: bool = False, queues: Queues = "group"
) -> dict[int, Wait]:
    """The ranks that can never go on, by rank; empty if the program comes to its end.

    Messages are taken to be the same, in the same order, on both sides of each channel. With
    `blocking`, a rank waits in each send and receive until it is complete: plain blocking calls.
    """
    run = _Run(program, blocking, queues)
    moving = deque(range(program.num_ranks))
    while moving:
        rank = moving.popleft()
        run.advance(rank)
        moving.extend(run.woken())
    return {rank: run.wait(rank) for rank in range(program.num_ranks) if run.is_waiting(rank)}


_Queue = tuple[object, ...]


class _Run:
    """Positions of the ranks and what stands in their queues."""

    def __init__(self, program: Program, blocking: bool, shared: Queues) -> None:
        self.program, self.blocking, self.shared = program, blocking, shared
        self.position = [0] * program.num_ranks
        self.queues: dict[_Queue, deque[Action]] = {}
        self.issued: set[Action] = set()
        self.complete: set[Action] = set()
        self._to_wake: set[int] = set()

    def advance(self, rank: int) -> None:
        """Runs a rank until it has to wait or ends."""
        row = self.program.actions[rank]
        while self.position[rank] < len(row) and self._goes_on(row[self.position[rank]]):
            self.position[rank] += 1

    def _goes_on(self, action: Action) -> bool:
        """Does an action, if it can be done now."""
        if action.kind in COMPUTE:
            receive, _ = messages(self.program, action)
            return receive is None or receive in self.complete
        if action not in self.issued:
            self.issued.add(action)
            queue = self._queue(action)
            self.queues.setdefault(queue, deque()).append(action)
            self._match(queue)
        return not self.blocking or action in self.complete

    def _queue(self, action: Action) -> _Queue:
        """Which of its rank's queues a message stands in."""
        channel = channel_of(self.program, action)
        rank = self.program.placement[action.stage]
        if self.shared == "rank":
            return (rank,)
        if self.shared == "group":
            return rank, channel.direction, channel.sender < channel.receiver
        return rank, *channel

    def _match(self, queue: _Queue) -> None:
        """Completes what stands first on both sides, and so on from there."""
        changed = [queue]
        while changed:
            own = self.queues[changed.pop()]
            if not own:
                continue
            other = partner(own[0])
            peers = self.queues.get(self._queue(other))
            if peers and peers[0] == other:
                for done in (own.popleft(), peers.popleft()):
                    self.complete.add(done)
                    self._to_wake.add(self.program.placement[done.stage])
                    changed.append(self._queue(done))

    def woken(self) -> set[int]:
        """Ranks that something has completed for since the last call."""
        woken, self._to_wake = self._to_wake, set()
        return woken

    def is_waiting(self, rank: int) -> bool:
        """True if a rank has not come to its end."""
        return self.position[rank] < len(self.program.actions[rank]) or bool(self._open(rank))

    def _open(self, rank: int) -> list[Action]:
        """What stands in a rank's queues."""
        return [a for key, queue in self.queues.items() if key[0] == rank for a in queue]

    def wait(self, rank: int) -> Wait:
        """Where a rank waits, and for what."""
        row, position = self.program.actions[rank], self.position[rank]
        action = row[position] if position < len(row) else self._open(rank)[0]
        if action.kind in COMPUTE:
            receive, _ = messages(self.program, action)
            assert receive is not None, "it waits for an input"
            action = receive
        other = partner(action)
        peer = self.program.placement[other.stage]
        takes = f" to take {action}" if action.kind in SENDS else ""
        return Wait(position, f"waits for {other} of rank {peer}{takes}")
