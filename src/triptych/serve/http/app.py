"""The application: OpenAI's paths, health and metrics, over an engine that is already there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from triptych.serve.http.bodies import ChatBody, CompletionBody, Generation
from triptych.serve.http.client import EngineClient
from triptych.serve.http.errors import ApiError, answer_errors, json_response
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.guard import Guard
from triptych.serve.http.metrics import Metrics, Stopwatch
from triptych.serve.http.replies import ChatReply, CompletionReply, Reply
from triptych.serve.http.session import EventStream, Session
from triptych.serve.http.tokens import TokenTable
from triptych.serve.http.wanted import Prompter, Wanted

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot work; the message says why."},
    401: {"description": "No valid API key."},
    404: {"description": "No such model."},
    413: {"description": "The body is too long."},
    429: {"description": "Too many requests; Retry-After says when to come back."},
    503: {"description": "The server ends, or its engine is lost."},
}
_GONE = 499  # nobody reads it: the client has left


@dataclass(slots=True)
class Service:
    """What the paths share."""

    client: EngineClient
    prompter: Prompter
    exposure: Exposure
    metrics: Metrics
    table: TokenTable = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.table = TokenTable(self.prompter.tokenizer)

    def require_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not here; none named is this one."""
        if name is not None and name != self.exposure.name:
            message = f"there is no model {name[:80]!r} here; there is {self.exposure.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def model_document(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it; `max_model_len` is the limit that is enforced."""
        return {
            "id": self.exposure.name,
            "object": "model",
            "created": self.created,
            "owned_by": "triptych",
            "max_model_len": self.client.limits.context,
        }


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(
        title="Triptych",
        version="1",  # of OpenAI's interface
        summary=f"OpenAI-compatible server of {service.exposure.name}",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    answer_errors(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_watching(app, service)
    app.add_middleware(Guard, exposure=service.exposure, metrics=service.metrics)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        service.require_model(body.model)
        watch, most = Stopwatch(service.metrics), service.client.limits.max_running
        wanted = await asyncio.to_thread(service.prompter.completion, body, most)
        reply = CompletionReply(service.exposure.name, service.table, body.logprobs)
        return await _answer(service, body, wanted, reply, watch, request)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer in a dialogue."""
        service.require_model(body.model)
        watch = Stopwatch(service.metrics)
        wanted = await asyncio.to_thread(service.prompter.chat, body)
        top = (body.top_logprobs or 0) if body.logprobs else None
        reply = ChatReply(service.exposure.name, service.table, top)
        return await _answer(service, body, wanted, reply, watch, request)


async def _answer(
    service: Service,
    body: Generation,
    wanted: Wanted,
    reply: Reply,
    watch: Stopwatch,
    request: Request,
) -> Response:
    """Asks the engine; what it refuses is told before a stream begins."""
    conversation = service.client.ask(wanted.asks)
    await conversation.admitted()
    service.metrics.prompt_tokens.inc(wanted.num_prompt_tokens)
    session = Session(conversation, wanted, service.prompter.tokenizer, reply, watch)
    if body.stream:
        return EventStream(session, session.events(body.includes_usage))
    async with _watched(request) as gone:
        work = asyncio.create_task(session.whole())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return json_response(work.result()) if work.done() else Response(status_code=_GONE)
        finally:
            work.cancel()
            session.close()


@contextlib.asynccontextmanager
async def _watched(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """Inside, a task that ends when the client leaves."""

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(until_gone())
    try:
        yield task
    finally:
        task.cancel()


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [service.model_document()]})

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> Response:
        """One model."""
        service.require_model(name)
        return json_response(service.model_document())


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Whether requests are served."""
        failure = service.client.failure
        if failure is not None:
            return json_response({"status": "failed", "cause": str(failure)}, 503)
        if service.is_draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures in Prometheus' text form."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
