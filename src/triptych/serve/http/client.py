"""The engine as the API process sees it: asks go out, outputs come to those who asked.

A thread reads the pipe, so that neither side ever waits for the other to read; all else runs in the
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from triptych.errors import RunError, TriptychError
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Admission, Reason, Refusal, State
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.values import Ask, Output
from triptych.serve.http.messages import Abort, Admitted, Close, Ended, News, Stop

Event = Admitted | Sequence[Output] | TriptychError


class Refused(Exception):
    """A request that was not admitted."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class EngineClient:
    """Many conversations with one engine; used within one event loop.

    Args:
        pipe: to an engine that has said `Opened`.
        limits: what it said.
        when_lost: called once if the engine ends by itself.
        why_closed: what is to be said of a pipe that ends without a word.

    """

    def __init__(
        self,
        pipe: Connection,
        limits: Limits,
        when_lost: Callable[[], None],
        why_closed: Callable[[], TriptychError] = lambda: RunError("the engine has ended"),
    ) -> None:
        self.limits = limits
        self.load = Load(0, 0, 0, limits.num_blocks, 0, 0)
        self.failure: TriptychError | None = None
        self._pipe = pipe
        self._when_lost, self._why_closed = when_lost, why_closed
        self._ids = itertools.count(1)
        self._owners: dict[int, Conversation] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, name="engine pipe", daemon=True)
        self._thread.start()

    @property
    def num_living(self) -> int:
        """Requests that somebody waits for."""
        return len(self._owners)

    def ask(self, asks: Sequence[Ask]) -> Conversation:
        """Sends requests, which get numbers of their own. Raises what ended the engine."""
        if self.failure is not None:
            raise self.failure
        conversation = Conversation(self, [replace(ask, id=next(self._ids)) for ask in asks])
        for ask in conversation.asks:
            self._owners[ask.id] = conversation
            self.send(ask)
        return conversation

    def close(self) -> None:
        """Lets the engine end, which is no failure."""
        self.failure = self.failure or RunError("the server has ended")
        self.send(Close())
        self._thread.join()

    def send(self, command: Ask | Abort | Stop | Close) -> None:
        """Sends a command; an engine that is gone is told by the thread that reads."""
        with contextlib.suppress(OSError):
            self._pipe.send(command)

    def forget(self, request_id: int) -> bool:
        """Nothing more is expected for a request; whether something was."""
        return self._owners.pop(request_id, None) is not None

    def fail(self, error: TriptychError) -> None:
        """Tells everybody who waits that nothing more will come."""
        self.failure = self.failure or error
        for conversation in set(self._owners.values()):
            conversation.hear(error)

    # ---- what the engine says -----------------------------------------------------------------

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
            case News(outputs, load):
                self.load = load
                for request_id, group in itertools.groupby(outputs, lambda o: o.request_id):
                    self._hand(request_id, list(group))
            case Admitted(request_id):
                self._hand(request_id, message)
            case Ended(error):
                self._lost(error)

    def _hand(self, request_id: int, event: Event) -> None:
        owner = self._owners.get(request_id)  # None: it left, and this was under way
        if owner is not None:
            owner.hear(event)

    def _lost(self, error: TriptychError) -> None:
        if self.failure is None:
            self.fail(error)
            self._when_lost()


class Conversation:
    """The requests of one client, from asking until all answers have ended or the client leaves."""

    def __init__(self, client: EngineClient, asks: Sequence[Ask]) -> None:
        self.asks = asks
        self._client = client
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._living = {ask.id: set(range(ask.n)) for ask in asks}
        self._early: list[Output] = []  # that came before all were admitted

    def hear(self, event: Event) -> None:
        """Takes in what the engine says."""
        self._events.put_nowait(event)

    async def admitted(self) -> None:
        """Returns when all are admitted; else ends all of them.

        Raises:
            Refused: with why one was not admitted.
            TriptychError: for values that cannot work, or if the engine is lost.

        """
        awaited = {ask.id: ask for ask in self.asks}
        try:
            while awaited:
                event = await self._events.get()
                if isinstance(event, TriptychError):
                    raise event
                if isinstance(event, Admitted):
                    self._enter(awaited.pop(event.request_id), event.result)
                else:
                    self._early += event
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncIterator[Sequence[Output]]:
        """What comes, until all answers have ended; raises TriptychError if the engine is lost."""
        while self._early or self._living:
            event: Event = self._early or await self._events.get()
            self._early = []
            if isinstance(event, TriptychError):
                self.close()
                raise event
            assert not isinstance(event, Admitted)
            for output in event:
                if output.finish is not None:
                    self._end(output.request_id, output.continuation)
            yield event

    def stop(self, request_id: int, continuation: int) -> None:
        """Ends one answer, whose text is complete."""
        if continuation in self._living.get(request_id, ()):
            self._client.send(Stop(request_id, continuation))
            self._end(request_id, continuation)

    def close(self) -> bool:
        """Ends all that lives: nobody listens any more. Returns whether something lived."""
        lived = bool(self._living)
        for request_id in list(self._living):
            self._client.forget(request_id)
            self._client.send(Abort(request_id))
        self._living.clear()
        return lived

    def _enter(self, ask: Ask, result: Admission | TriptychError) -> None:
        if isinstance(result, TriptychError):
            raise result
        if result.refusal is not None:
            raise Refused(result.refusal)
        if result.state is State.FINISHED:
            self._early += [Output(ask.id, i, None, Reason.LENGTH) for i in range(ask.n)]

    def _end(self, request_id: int, continuation: int) -> None:
        living = self._living.get(request_id, set())
        living.discard(continuation)
        if not living and self._living.pop(request_id, None) is not None:
            self._client.forget(request_id)
