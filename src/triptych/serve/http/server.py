"""The server's life: a socket, an engine process, the application, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import uvicorn

from triptych.errors import InputError, Problem, RunError
from triptych.plan.plan import Plan
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.app import Service, make_app
from triptych.serve.http.client import EngineClient
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.link import EngineProcess
from triptych.serve.http.metrics import Metrics
from triptych.serve.http.wanted import Prompter

_IDLE_S = 75
"""Seconds that an idle connection is kept: longer than clients pause, so that none is cut as one
sends.
"""
_LATE_S = 5
"""Seconds after the end of draining until connections are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and how it ends.

    Args:
        host: loopback unless said otherwise.
        port: 0 takes a free one.
        drain_s: seconds that requests may take to end once the server is asked to.
        exposure: what clients may do.
        engine: sizes of the engine.
        policy: latency objectives, and whether requests that would miss them are refused.

    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    exposure: Exposure
    engine: EngineSettings = field(default_factory=EngineSettings)
    policy: Policy = field(default_factory=Policy)


def serve(
    engine: EngineProcess,
    source: ModelSource,
    plan: Plan | None,
    settings: ServerSettings,
    when_ready: Callable[[str, Limits], None],
) -> str:
    """Serves a model until a signal asks for the end; returns the signal's name.

    Args:
        engine: a process that has not been opened.
        source: the model.
        plan: tensor and pipeline degrees; None: one process.
        settings: where and how.
        when_ready: gets the URL of the interface and the limits once requests are taken.

    Raises:
        InputError: an address that is taken, a model, a plan or sizes that do not work.
        RunError: the engine died, with the cause.

    """
    with _listening(settings.host, settings.port) as listener:
        engine.open(source.folder, plan, settings.engine, settings.policy)
        prompter = Prompter(source)  # while the engine loads
        limits = engine.opened()
        life = _Life(engine, limits, prompter, settings)
        ready = partial(when_ready, _url(listener), limits)
        return asyncio.run(life.live(listener, ready))


class _Life:
    """From the first request to the last."""

    def __init__(
        self,
        engine: EngineProcess,
        limits: Limits,
        prompter: Prompter,
        settings: ServerSettings,
    ) -> None:
        self._engine, self._limits = engine, limits
        self._prompter, self._settings = prompter, settings

    async def live(self, listener: socket.socket, ready: Callable[[], None]) -> str:
        """Serves until the end; the signal that asked for it. Raises what ended the engine."""
        client = EngineClient(self._engine.pipe, self._limits, self._lost, self._engine.death)
        metrics = Metrics(self._limits, lambda: client.load)
        self._service = Service(client, self._prompter, self._settings.exposure, metrics)
        self._server = _Server(self._config(), ready, self._drain)
        try:
            await self._server.serve(sockets=[listener])
            if self._server.stopped_by is None and client.failure is not None:
                raise client.failure
        finally:
            client.close()
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

    def _lost(self) -> None:
        self._server.should_exit = True

    def _drain(self) -> None:
        """No new requests; those that are there may end in their time."""
        self._service.is_draining = True
        drain_s = self._settings.drain_s
        error = RunError(f"it was asked to end, and requests may take {drain_s:g} s after that")
        asyncio.get_running_loop().call_later(drain_s, self._service.client.fail, error)


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
