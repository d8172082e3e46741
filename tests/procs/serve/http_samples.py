"""A server in threads of this process: the same code but for the walls between processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

import openai
import uvicorn

from triptych.serve.core.scheduler import Load
from triptych.serve.engine.engine import Engine
from triptych.serve.engine.settings import EngineSettings
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.app import Service, make_app
from triptych.serve.http.client import EngineClient
from triptych.serve.http.engine_process import run_engine
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.messages import Opened
from triptych.serve.http.metrics import Metrics
from triptych.serve.http.wanted import Prompter

NAME = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Server:
    """What tests see of a server."""

    url: str
    service: Service
    engine: Engine

    def client(self, **options: object) -> openai.OpenAI:
        """OpenAI's own client, which does not try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    @property
    def load(self) -> Load:
        """Of the engine, as the API process knows it."""
        return self.service.client.load

    def in_loop(self, call: Callable[[], object]) -> None:
        """Runs something in the event loop of the server."""
        self.service.client._loop.call_soon_threadsafe(call)


@contextmanager
def serving(
    folder: Path,
    settings: EngineSettings | None = None,
    exposure: Exposure | None = None,
    open_engine: Callable[[], Engine] | None = None,
) -> Iterator[Server]:
    """A server of the model in a folder, or of an engine that only has its tokenizer."""
    ours, its = Pipe()
    engines: list[Engine] = []

    def opened() -> Engine:
        made = open_engine() if open_engine else Engine.open(folder, None, settings)
        engines.append(made)
        return made

    engine_thread = threading.Thread(target=run_engine, args=(its, opened), daemon=True)
    engine_thread.start()
    message = ours.recv()
    assert isinstance(message, Opened), message
    started: list[Server] = []
    is_up = threading.Event()

    async def live() -> None:
        client = EngineClient(ours, message.limits, when_lost=lambda: None)
        service = Service(
            client,
            Prompter(ModelSource.open(folder)),
            exposure or Exposure(name=NAME),
            Metrics(message.limits, lambda: client.load),
        )
        config = uvicorn.Config(make_app(service), port=0, log_level="error", lifespan="off")
        servers.append(uvicorn.Server(config))
        task = asyncio.create_task(servers[0].serve())
        while not servers[0].started:
            await asyncio.sleep(0.01)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        started.append(Server(f"http://127.0.0.1:{port}", service, engines[0]))
        is_up.set()
        await task
        await asyncio.to_thread(client.close)

    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert is_up.wait(60)
    try:
        yield started[0]
    finally:
        servers[0].should_exit = True
        thread.join(30)
        engine_thread.join(30)
        assert not thread.is_alive() and not engine_thread.is_alive()
