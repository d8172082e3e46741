"""The router of a server at work: requests go to groups, and elsewhere when a group is lost.

What is on its way when a group is lost goes to another one if nothing of its answer has come yet;
else, and if no other holds its model, its client is told.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from triptych.errors import RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.fleet.router import Ticket, Wanted
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Refusal
from triptych.serve.engine.values import Ask
from triptych.serve.http.client import Conversation, GroupLost, Refused
from triptych.serve.http.groups import Group, Groups, Started
from triptych.serve.http.hosting import Hosting
from triptych.serve.http.link import GroupProcess
from triptych.serve.http.metrics import Held

MOST_ARRIVALS = 5000  # that are remembered, to place models anew


class Arrival(NamedTuple):
    """A request that came, whether it was refused or not."""

    at_s: float
    model: str
    prompt_tokens: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class _Trip:
    """Where the requests of a conversation are."""

    fleet: Fleet
    ticket: Ticket

    def heard(self, num_tokens: int) -> None:
        if num_tokens:
            self.fleet.router.heard(self.ticket, num_tokens, self.fleet.clock())

    def ended(self, is_whole: bool) -> None:
        kept = self.fleet.router.ended(self.ticket, self.fleet.clock(), is_whole)
        if is_whole:
            self.fleet.when_ended(self.ticket.place.model, kept)


class Fleet:
    """What the paths of a server ask; used within one event loop.

    Args:
        hosting: what runs.
        started: the processes of its groups, in their order.
        start: starts the process of a group.
        when_lost: called once if a group is lost and is not to be started again.
        say: gets what an operator should know.
        clock: seconds.

    """

    def __init__(
        self,
        hosting: Hosting,
        started: Sequence[Started],
        start: Callable[[HostGroup], GroupProcess],
        when_lost: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.failure: TriptychError | None = None
        self.arrivals: deque[Arrival] = deque(maxlen=MOST_ARRIVALS)
        self.when_ended: Callable[[str, bool], None] = lambda *_: None
        self._when_lost = when_lost
        self._request_ids = itertools.count(1)
        self._groups = Groups(hosting, start, self._rescue, self._lost, say)
        self._groups.take(started)
        self.router = self._groups.router

    @property
    def groups(self) -> list[Group]:
        """All of them, those that are lost and start again included."""
        return self._groups.all

    @property
    def hosting(self) -> Hosting:
        """What runs."""
        return self._groups.hosting

    async def become(self, hosting: Hosting, when_there: Callable[[], None] = lambda: None) -> None:
        """Serves other models on other groups; see `Groups.become`."""
        await self._groups.become(hosting, when_there)

    def ask(self, model: str, asks: Sequence[Ask]) -> Conversation:
        """Sends requests, which get numbers of their own, to the group that answers first.

        Raises:
            Refused: if their objectives would be missed.
            TriptychError: if no group that holds the model serves.

        """
        numbered = [replace(ask, id=next(self._request_ids)) for ask in asks]
        wanted = self._wanted(model, numbered)
        self.arrivals.append(Arrival(self.clock(), model, wanted.prompt_tokens, wanted.max_tokens))
        trip = _Trip(self, self._routed(model, wanted))
        conversation = Conversation(model, numbered, trip)
        self._send(conversation, trip)
        return conversation

    def limits(self, model: str) -> Limits | None:
        """The limits of a model, the smallest of its groups; None if no group serves it."""
        found = [g.client.limits[model] for g in self.groups if g.client and model in g.places]
        return min(found, key=lambda limits: limits.context, default=None)

    def loads(self) -> list[Held]:
        """Each model on each group that serves."""
        return [
            Held(model, g.number, g.client.limits[model], g.client.loads[model], place.times.price)
            for g in self.groups
            if g.client is not None
            for model, place in g.places.items()
        ]

    @property
    def num_living(self) -> int:
        """Requests that somebody waits for."""
        return sum(group.client.num_living for group in self.groups if group.client)

    def states(self) -> list[dict[str, Any]]:
        """Of each group: what it should hold, and whether it serves all of that, or some."""
        return [
            {
                "group": group.number,
                "shape": str(group.spec.shape),
                "models": sorted(group.spec.models),
                "status": group.status,
                **({"cause": group.cause} if group.cause else {}),
            }
            for group in self.groups
        ]

    def fail(self, error: TriptychError) -> None:
        """Tells everybody who waits that nothing more will come."""
        self.failure = self.failure or error
        for group in self.groups:
            if group.client is not None:
                group.client.fail(error)

    async def close(self) -> None:
        """Lets all groups end, which is no failure."""
        self.failure = self.failure or RunError("the server has ended")
        await self._groups.close()

    # ---- within -------------------------------------------------------------------------------

    def _wanted(self, model: str, asks: Sequence[Ask]) -> Wanted:
        limits = self.limits(model)
        context = limits.context if limits is not None else 0
        most = max(
            max(0, context - len(ask.prompt)) if ask.max_tokens is None else ask.max_tokens
            for ask in asks
        )
        return Wanted(sum(len(ask.prompt) for ask in asks), most, sum(ask.n for ask in asks))

    def _routed(self, model: str, wanted: Wanted) -> Ticket:
        if self.failure is not None:
            raise self.failure
        if not self.router.serving(model):
            causes = [g.cause for g in self.groups if model in g.spec.models and g.cause]
            why = f": {causes[0]}" if causes else ""
            raise GroupLost(f"no group that holds {model!r} serves at the moment{why}")
        found = self.router.route(model, wanted, self.clock())
        if isinstance(found, Refusal):
            self.when_ended(model, False)
            raise Refused(found)
        return found

    def _send(self, conversation: Conversation, trip: _Trip) -> None:
        number = trip.ticket.place.group
        group = next(group for group in self.groups if group.number == number)
        assert group.client is not None
        group.client.ask(conversation)

    def _rescue(self, conversations: set[Conversation], number: int, error: TriptychError) -> None:
        """Sends what has not begun elsewhere; tells the others."""
        for conversation in sorted(conversations, key=lambda c: c.asks[0].id):
            trip = conversation.trip
            assert isinstance(trip, _Trip)
            self.router.ended(trip.ticket, self.clock(), is_whole=False)
            if conversation.has_begun:
                words = f"group {number} was lost within the answer: {error}"
                self.when_ended(conversation.model, False)
                conversation.hear(GroupLost(words))
                continue
            try:
                trip.ticket = self._routed(conversation.model, trip.ticket.wanted)
            except Refused as why:
                conversation.hear(why)
            except TriptychError:
                words = f"group {number} was lost before the answer: {error}"
                self.when_ended(conversation.model, False)
                conversation.hear(GroupLost(words))
            else:
                self._send(conversation, trip)

    def _lost(self, error: TriptychError) -> None:
        self.failure = self.failure or error
        self._when_lost()
