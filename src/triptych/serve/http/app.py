"""The application: OpenAI's paths, health and metrics, over groups that are already there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from triptych.errors import nearest
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import DEFAULT_CLASS
from triptych.serve.engine.source import ModelSource
from triptych.serve.http.bodies import ChatBody, CompletionBody, Generation
from triptych.serve.http.client import GroupLost
from triptych.serve.http.errors import ApiError, answer_errors, json_response
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.fleet import Fleet
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
_MOST_NAMES = 10  # in a message
_OPENAI_TIERS = {"auto", "flex", "priority", "scale"}  # like default where they are not served
_GONE = 499  # nobody reads it: the client has left


@dataclass(frozen=True, slots=True)
class Offer:
    """A model as clients see it."""

    prompter: Prompter
    table: TokenTable
    created: int

    @classmethod
    def of(cls, source: ModelSource) -> Offer:
        """The offer of a folder; reads its tokenizer."""
        prompter = Prompter(source)
        return cls(prompter, TokenTable(prompter.tokenizer), int(time.time()))


@dataclass(slots=True)
class Service:
    """What the paths share. `offers` may change: requests go by what is there when they come."""

    fleet: Fleet
    offers: dict[str, Offer]
    exposure: Exposure
    metrics: Metrics
    is_draining: bool = False

    def model(self, name: str | None) -> str:
        """The model that is meant; of one alone there is no need to say.

        Raises ApiError for a model that is not here, with the names that are near.
        """
        if name in self.offers:
            return str(name)
        if name is None and len(self.offers) == 1:
            return next(iter(self.offers))
        known = nearest(name or "", self.offers) or sorted(self.offers)
        there = " | ".join(repr(each) for each in known[:_MOST_NAMES])
        what = "no model is named" if name is None else f"there is no model {name[:80]!r} here"
        status = 400 if name is None else 404
        message = f"{what}; there is {there}"
        raise ApiError(status, message, param="model", code="model_not_found")

    def tier(self, name: str, asked: str | None) -> str:
        """The latency class that is meant, `default` for those of OpenAI's that are not here.

        Raises ApiError for others, with the classes of the model.
        """
        classes = self.fleet.hosting.models[name].policy.by_name
        if asked is None or asked in classes:
            return asked or DEFAULT_CLASS
        if asked in _OPENAI_TIERS:
            return DEFAULT_CLASS
        message = f"no service_tier {asked[:80]!r} here; there is {' | '.join(classes)}"
        raise ApiError(400, message, param="service_tier")

    def limits(self, name: str) -> Limits:
        """Of a model. Raises what keeps all its groups from serving."""
        found = self.fleet.limits(name)
        if found is None:
            raise self.fleet.failure or GroupLost(f"no group that holds {name!r} serves just now")
        return found

    def document(self, name: str) -> dict[str, Any]:
        """A model as `/v1/models` lists it; `max_model_len` is the limit that is enforced."""
        limits, claim = self.fleet.limits(name), self.fleet.hosting.models[name].terms.claim
        found = {
            "id": name,
            "object": "model",
            "created": self.offers[name].created,
            "owned_by": "triptych",
            "max_model_len": limits.context if limits else None,
        }
        classes = self.fleet.hosting.models[name].policy.by_name
        if len(classes) > 1:
            found["service_tiers"] = [*classes]
        if len(self.offers) > 1:
            found |= {
                "max_running": limits.max_running if limits else None,
                "weight": claim.weight,
                "guarantee": claim.guarantee,
            }
        return found


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(
        title="Triptych",
        version="1",  # of OpenAI's interface
        summary=f"OpenAI-compatible server of {', '.join(service.offers)}",
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
        name = service.model(body.model)
        watch, most = Stopwatch(service.metrics, name), service.limits(name).max_running
        offer = service.offers[name]
        wanted = await asyncio.to_thread(offer.prompter.completion, body, most)
        tier = service.tier(name, body.service_tier)
        reply = CompletionReply(name, offer.table, body.logprobs, tier)
        return await _answer(service, name, offer, body, wanted, reply, watch, request)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer in a dialogue."""
        name = service.model(body.model)
        watch, offer = Stopwatch(service.metrics, name), service.offers[name]
        wanted = await asyncio.to_thread(offer.prompter.chat, body)
        top = (body.top_logprobs or 0) if body.logprobs else None
        reply = ChatReply(name, offer.table, top, service.tier(name, body.service_tier))
        return await _answer(service, name, offer, body, wanted, reply, watch, request)


async def _answer(
    service: Service,
    name: str,
    offer: Offer,
    body: Generation,
    wanted: Wanted,
    reply: Reply,
    watch: Stopwatch,
    request: Request,
) -> Response:
    """Asks the engine; what it refuses is told before a stream begins."""
    asks = [replace(ask, latency_class=reply.tier) for ask in wanted.asks]
    conversation = service.fleet.ask(name, asks)
    await conversation.admitted()
    service.metrics.prompt_tokens.labels(name).inc(wanted.num_prompt_tokens)
    session = Session(conversation, wanted, offer.prompter.tokenizer, reply, watch)
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
        """The models that are served."""
        found = [service.document(name) for name in service.offers]
        return json_response({"object": "list", "data": found})

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> Response:
        """One model."""
        return json_response(service.document(service.model(name)))


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Response:
        """Whether requests are served, and by which groups if there are several models."""
        fleet = service.fleet
        groups = {"groups": fleet.states()} if fleet.hosting.restarts else {}
        if fleet.failure is not None:
            return json_response({"status": "failed", "cause": str(fleet.failure)}, 503)
        if service.is_draining:
            return json_response({"status": "draining", **groups}, 503)
        served = [name for name in service.offers if fleet.limits(name) is not None]
        if not served:
            return json_response({"status": "starting", **groups}, 503)
        is_whole = all(group["status"] == "serving" for group in fleet.states())
        return json_response({"status": "ok" if is_whole else "degraded", **groups})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures in Prometheus' text form."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
