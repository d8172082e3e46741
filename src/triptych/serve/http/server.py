"""The server's life: a socket, processes of groups, the application, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn

from triptych.errors import InputError, Problem, RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.serve.core.limits import Limits
from triptych.serve.http.app import Offer, Service, make_app
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.fleet import Fleet
from triptych.serve.http.groups import Started
from triptych.serve.http.hosting import Hosting
from triptych.serve.http.link import GroupProcess
from triptych.serve.http.metrics import Metrics
from triptych.serve.http.replace import better

_IDLE_S = 75
"""Seconds that an idle connection is kept: longer than clients pause, so that none is cut as one
sends.
"""
_LATE_S = 5
"""Seconds after the end of draining until connections are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, how it changes and how it ends.

    Args:
        host: loopback unless said otherwise.
        port: 0 takes a free one.
        drain_s: seconds that requests may take to end once the server is asked to.
        exposure: what clients may do.
        replace_every_s: models are placed anew so often, by what was asked of late; None: never.

    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    exposure: Exposure
    replace_every_s: float | None = None


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who follows a server: gets the URL and the limits of all models once requests are taken, and
    what an operator should know; gives what to serve after SIGHUP.
    """

    ready: Callable[[str, Mapping[str, Limits]], None]
    say: Callable[[str], None] = lambda _: None
    reread: Callable[[], Hosting] | None = None


def serve(
    hosting: Hosting,
    processes: Sequence[GroupProcess],
    settings: ServerSettings,
    watcher: Watcher,
    start: Callable[[HostGroup], GroupProcess] = lambda spec: GroupProcess(spec.cores),
) -> str:
    """Serves models until a signal asks for the end; returns the signal's name.

    Args:
        hosting: the models and their groups.
        processes: of the groups, which have not been opened; whoever made them ends them.
        settings: where and how.
        watcher: is told.
        start: starts processes for groups that come later.

    Raises:
        InputError: an address that is taken, a model, a plan or sizes that do not work.
        RunError: the one group of a server that is not to start it again died, with the cause.

    """
    with _listening(settings.host, settings.port) as listener:
        for process, spec in zip(processes, hosting.groups, strict=True):
            process.open(hosting.start(spec))
        offers = {name: Offer.of(model.source) for name, model in hosting.models.items()}
        started = [
            Started(process, process.opened(len(spec.models)))
            for process, spec in zip(processes, hosting.groups, strict=True)
        ]
        life = _Life(offers, settings, watcher)
        make = partial(Fleet, hosting, started, start, say=watcher.say)
        return asyncio.run(life.live(listener, make))


class _Life:
    """From the first request to the last."""

    def __init__(
        self, offers: dict[str, Offer], settings: ServerSettings, watcher: Watcher
    ) -> None:
        self._offers, self._settings, self._watcher = offers, settings, watcher
        self._tasks: set[asyncio.Task[None]] = set()

    async def live(self, listener: socket.socket, make: Callable[..., Fleet]) -> str:
        """Serves until the end; the signal that asked for it. Raises what ended the engine."""
        self._fleet = fleet = make(when_lost=self._lost)
        metrics = Metrics(fleet.loads)
        fleet.when_ended = metrics.ended
        self._service = Service(fleet, self._offers, self._settings.exposure, metrics)
        self._server = _Server(self._config(), partial(self._ready, listener), self._drain)
        try:
            await self._server.serve(sockets=[listener])
            if self._server.stopped_by is None and fleet.failure is not None:
                raise fleet.failure
        finally:
            for task in self._tasks:
                task.cancel()
            await fleet.close()
        return self._server.stopped_by or "nothing"

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            make_app(self._service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=int(self._settings.drain_s) + _LATE_S,
        )

    def _ready(self, listener: socket.socket) -> None:
        loop, fleet = asyncio.get_running_loop(), self._fleet
        if self._watcher.reread is not None:
            loop.add_signal_handler(signal.SIGHUP, lambda: self._do(self._reread()))
        if self._settings.replace_every_s is not None:
            self._do(self._replace(self._settings.replace_every_s))
        limits = {name: found for name in self._offers if (found := fleet.limits(name))}
        self._watcher.ready(_url(listener), limits)

    async def _reread(self) -> None:
        """Serves what the file says now; if that does not work, what it said before."""
        assert self._watcher.reread is not None
        try:
            hosting = await asyncio.to_thread(self._watcher.reread)
            await self.become(hosting)
        except TriptychError as error:
            self._watcher.say(f"all stays as it is:\n{error}")
        else:
            self._watcher.say(f"serving {_words(self._fleet)}")

    async def _replace(self, every_s: float) -> None:
        """Places models anew now and then."""
        while True:
            await asyncio.sleep(every_s)
            try:
                hosting = await better(self._fleet, every_s)
                if hosting is not None:
                    await self.become(hosting)
                    self._watcher.say(f"placed anew: {_words(self._fleet)}")
            except TriptychError as error:
                self._watcher.say(f"all stays as it is:\n{error}")

    async def become(self, hosting: Hosting) -> None:
        """Serves other models: new ones are offered when they are there, old ones until they go."""
        offers = self._service.offers
        new = {
            name: await asyncio.to_thread(Offer.of, model.source)
            for name, model in hosting.models.items()
            if name not in offers
        }
        await self._fleet.become(hosting, lambda: offers.update(new))
        for name in set(offers) - set(hosting.models):
            del offers[name]

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self) -> None:
        self._server.should_exit = True

    def _drain(self) -> None:
        """No new requests; those that are there may end in their time."""
        self._service.is_draining = True
        drain_s = self._settings.drain_s
        error = RunError(f"it was asked to end, and requests may take {drain_s:g} s after that")
        asyncio.get_running_loop().call_later(drain_s, self._fleet.fail, error)


def _words(fleet: Fleet) -> str:
    """What is where: `group 0 a b, group 1 b`."""
    return ", ".join(f"group {g.number} {' '.join(sorted(g.places))}" for g in fleet.groups)


class _Server(uvicorn.Server):
    """Ends gracefully at the first signal and at once at the second, with a normal exit."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], drain: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.stopped_by: str | None = None
        self._ready, self._drain = ready, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes requests, and says so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, signals ask for the end."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._asked, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _asked(self, number: signal.Signals) -> None:
        self.force_exit = self.stopped_by is not None
        if not self.force_exit:
            self.stopped_by, self.should_exit = number.name, True
            self._drain()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound before anything slow begins. Raises InputError if it cannot be."""
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            works = "another --port (0 takes a free one), an address of this machine as --host"
            what = f"cannot listen on {host}:{port}: {error}"
            raise InputError(Problem(what, works=works)) from None
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
