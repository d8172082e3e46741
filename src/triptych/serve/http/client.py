"""A group as the API process sees it: asks go out, outputs come to those who asked.

A thread reads the pipe, so that neither side ever waits for the other to read; all else runs in the
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from triptych.errors import RunError, TriptychError
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Reason, Refusal, State
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.values import Ask, Output
from triptych.serve.http.messages import Abort, Admitted, Close, Ended, Gone, News, Opened, Stop, To


class Refused(Exception):
    """A request that was not admitted."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class GroupLost(RunError):
    """A group has gone that will come again."""


Event = Admitted | Sequence[Output] | TriptychError | Refused


class Listener(Protocol):
    """Who is told what becomes of a group."""

    def told(self, group: GroupClient, message: News | Opened | Gone) -> None:
        """Something has happened; conversations have heard of it."""

    def lost(self, group: GroupClient, error: TriptychError) -> None:
        """The group has ended by itself; once. Conversations have not heard of it."""


class Trip(Protocol):
    """Who follows the requests of a conversation, wherever they are."""

    def heard(self, num_tokens: int) -> None:
        """So many tokens have come."""

    def ended(self, is_whole: bool) -> None:
        """Nothing more comes, once; whether all answers are whole."""


class GroupClient:
    """Many conversations with the engines of one group; used within one event loop.

    Args:
        pipe: to a group that has said `Opened` of all its models.
        limits: what it said.
        listener: who is told more.
        why_closed: what is to be said of a pipe that ends without a word.

    """

    def __init__(
        self,
        pipe: Connection,
        limits: Mapping[str, Limits],
        listener: Listener,
        why_closed: Callable[[], TriptychError] = lambda: RunError("the engine has ended"),
    ) -> None:
        self.limits = dict(limits)
        self.loads = {name: Load.idle(each) for name, each in limits.items()}
        self.failure: TriptychError | None = None
        self._pipe = pipe
        self._listener, self._why_closed = listener, why_closed
        self._owners: dict[int, Conversation] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, name="group pipe", daemon=True)
        self._thread.start()

    @property
    def num_living(self) -> int:
        """Requests that somebody waits for."""
        return len(self._owners)

    @property
    def conversations(self) -> set[Conversation]:
        """Those that are under way."""
        return set(self._owners.values())

    def ask(self, conversation: Conversation) -> None:
        """Sends the asks of a conversation; raises what ended the group."""
        if self.failure is not None:
            raise self.failure
        conversation.client = self
        for ask in conversation.asks:
            self._owners[ask.id] = conversation
            self.send(To(conversation.model, ask))

    def close(self) -> None:
        """Lets the group end, which is no failure."""
        self.failure = self.failure or RunError("the server has ended")
        self.send(Close())
        self._thread.join()

    def send(self, command: object) -> None:
        """Sends a command; a group that is gone is told by the thread that reads."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def forget(self, request_id: int) -> bool:
        """Nothing more is expected for a request; whether something was."""
        return self._owners.pop(request_id, None) is not None

    def fail(self, error: TriptychError) -> None:
        """Tells everybody who waits that nothing more will come."""
        self.failure = self.failure or error
        for conversation in self.conversations:
            conversation.hear(error)

    # ---- what the group says ------------------------------------------------------------------

    def _read(self) -> None:
        """In a thread of its own."""
        try:
            while True:
                self._in_loop(self._take, self._pipe.recv())
        except (EOFError, OSError):
            self._in_loop(self._lost, self._why_closed())

    def _in_loop(self, callback: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(callback, argument)

    def _take(self, message: object) -> None:
        match message:
            case News(outputs, loads):
                self.loads |= loads
                for request_id, group in itertools.groupby(outputs, lambda o: o.request_id):
                    self._hand(request_id, list(group))
                self._listener.told(self, message)
            case Admitted(request_id):
                self._hand(request_id, message)
            case Opened(model, limits):
                self.limits[model] = limits
                self._listener.told(self, message)
            case Gone(model):
                self.limits.pop(model, None)
                self.loads.pop(model, None)
                self._listener.told(self, message)
            case Ended(error):
                self._lost(error)

    def _hand(self, request_id: int, event: Event) -> None:
        owner = self._owners.get(request_id)  # None: it left, and this was under way
        if owner is not None:
            owner.hear(event)

    def _lost(self, error: TriptychError) -> None:
        if self.failure is None:
            self.failure = error
            self._listener.lost(self, error)


class Conversation:
    """The requests of one client, from asking until all answers have ended or the client leaves."""

    client: GroupClient

    def __init__(self, model: str, asks: Sequence[Ask], trip: Trip) -> None:
        self.model, self.asks, self.trip = model, asks, trip
        self.has_begun = False  # something of an answer has come
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._living = {ask.id: set(range(ask.n)) for ask in asks}
        self._early: list[Output] = []  # that came before all were admitted

    def hear(self, event: Event) -> None:
        """Takes in what the group says."""
        if not isinstance(event, Admitted | TriptychError | Refused):
            self.has_begun = True
            self.trip.heard(sum(output.token is not None for output in event))
        self._events.put_nowait(event)

    async def admitted(self) -> None:
        """Returns when all are admitted; else ends all of them.

        Raises:
            Refused: with why one was not admitted.
            TriptychError: for values that cannot work, or if the group is lost.

        """
        awaited = {ask.id for ask in self.asks}
        try:
            while awaited:
                event = await self._events.get()
                if isinstance(event, TriptychError | Refused):
                    raise event
                if isinstance(event, Admitted):
                    self._enter(event)
                    awaited.discard(event.request_id)
                else:
                    self._early += event
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncIterator[Sequence[Output]]:
        """What comes, until all answers have ended; raises TriptychError if the group is lost."""
        while self._early or self._living:
            event: Event = self._early or await self._events.get()
            self._early = []
            if isinstance(event, TriptychError | Refused):
                self.close()
                raise event
            if isinstance(event, Admitted):  # again, elsewhere
                self._enter(event)
                continue
            for output in event:
                if output.finish is not None:
                    self._end(output.request_id, output.continuation)
            yield event

    def stop(self, request_id: int, continuation: int) -> None:
        """Ends one answer, whose text is complete."""
        if continuation in self._living.get(request_id, ()):
            self.client.send(To(self.model, Stop(request_id, continuation)))
            self._end(request_id, continuation)

    def close(self) -> bool:
        """Ends all that lives: nobody listens any more. Returns whether something lived."""
        lived = bool(self._living)
        for request_id in list(self._living):
            self.client.forget(request_id)
            self.client.send(To(self.model, Abort(request_id)))
        self._living.clear()
        if lived:
            self.trip.ended(False)
        return lived

    def _enter(self, admitted: Admitted) -> None:
        """Takes in an admission; raises what it is if it is none."""
        result = admitted.result
        if isinstance(result, TriptychError):
            raise result
        if result.refusal is not None:
            raise Refused(result.refusal)
        if result.state is State.FINISHED:
            (ask,) = (ask for ask in self.asks if ask.id == admitted.request_id)
            self._early += [Output(ask.id, i, None, Reason.LENGTH) for i in range(ask.n)]

    def _end(self, request_id: int, continuation: int) -> None:
        living = self._living.get(request_id, set())
        living.discard(continuation)
        if not living and self._living.pop(request_id, None) is not None:
            self.client.forget(request_id)
            if not self._living:
                self.trip.ended(True)
