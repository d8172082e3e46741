"""A server in threads of this process: the same code but for the walls between processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import openai
import uvicorn

from triptych.errors import RunError, TriptychError
from triptych.fleet.llm_file import HostGroup
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.scheduler import Load
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.hosts import Hosts
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.app import Offer, Service, make_app
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.fleet import Fleet
from triptych.serve.http.group_process import run_group
from triptych.serve.http.groups import Started
from triptych.serve.http.hosting import Hosting, ServedModel, single
from triptych.serve.http.messages import Ended
from triptych.serve.http.metrics import Metrics
from triptych.serve.http.wanted import Prompter

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class GroupThread:
    """In place of the process of a group."""

    def __init__(self, open_hosts: Callable[[], Hosts]) -> None:
        self.pipe, its = Pipe()
        self._thread = threading.Thread(target=run_group, args=(its, open_hosts), daemon=True)

    def open(self, *_: object) -> None:
        self._thread.start()

    def opened(self, num_models: int) -> dict[str, Limits]:
        found: dict[str, Limits] = {}
        while len(found) < num_models:
            message = self.pipe.recv()
            if isinstance(message, Ended):
                raise message.error
            found[message.model] = message.limits
        return found

    def death(self) -> TriptychError:
        return RunError("it ended without a word")

    def end(self, *, is_waited_for: bool = True) -> None:
        self._thread.join(30)
        self.pipe.close()

    def is_alive(self) -> bool:
        return self._thread.is_alive()


@dataclass
class Server:
    """What tests see of a server."""

    url: str
    service: Service
    engines: list[Engine]
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> Engine:
        """The only one."""
        (engine,) = self.engines
        return engine

    def do(self, work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
        """Runs something in the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def client(self, **options: object) -> openai.OpenAI:
        """OpenAI's own client, which does not try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    @property
    def load(self) -> Load:
        """Of the engine, as the API process knows it."""
        (held,) = self.service.fleet.loads()
        return held.load

    @property
    def prompter(self) -> Prompter:
        """Of the model."""
        return self.service.offers[NAME].prompter


@contextmanager
def serving(
    folder: Path,
    settings: EngineSettings | None = None,
    exposure: Exposure | None = None,
    open_engine: Callable[[], Engine] | None = None,
    policy: Policy | None = None,
) -> Iterator[Server]:
    """A server of the model in a folder, or of an engine that only has its tokenizer."""
    engines: list[Engine] = []

    def opened() -> Hosts:
        hosts = Hosts()
        made = open_engine() if open_engine else Engine.open(folder, None, settings)
        engines.append(made)
        hosts.engines[NAME] = made
        return hosts

    group = GroupThread(opened)
    group.open()
    limits = group.opened(1)
    hosting = single(NAME, ServedModel(source=ModelSource.open(folder), policy=policy or Policy()))
    with running(hosting, [Started(group, limits)], exposure=exposure) as server:  # type: ignore[arg-type]
        server.engines += engines
        yield server
    assert not group.is_alive()


@contextmanager
def running(
    hosting: Hosting,
    started: list[Started],
    start: Callable[[HostGroup], Any] = lambda _: None,
    exposure: Exposure | None = None,
) -> Iterator[Server]:
    """A server of groups that have started."""
    found: list[Server] = []
    is_up = threading.Event()

    async def live() -> None:
        fleet = Fleet(hosting, started, start)
        metrics = Metrics(fleet.loads)
        fleet.when_ended = metrics.ended
        offers = {name: Offer.of(model.source) for name, model in hosting.models.items()}
        service = Service(fleet, offers, exposure or Exposure(), metrics)
        config = uvicorn.Config(make_app(service), port=0, log_level="error", lifespan="off")
        servers.append(uvicorn.Server(config))
        task = asyncio.create_task(servers[0].serve())
        while not servers[0].started:
            await asyncio.sleep(0.01)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        found.append(Server(f"http://127.0.0.1:{port}", service, [], asyncio.get_running_loop()))
        is_up.set()
        await task
        await fleet.close()

    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert is_up.wait(60)
    try:
        yield found[0]
    finally:
        servers[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()
