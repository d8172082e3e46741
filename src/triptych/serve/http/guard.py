"""What stands before all requests: the API key, the size of bodies, how many are served at once."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.serve.http.errors import ApiError
from triptych.serve.http.exposure import Exposure
from triptych.serve.http.metrics import Metrics

_BODY_S = 60.0
"""Seconds that a client may take between two pieces of a body: it holds a place meanwhile."""


class Guard:
    """Lets requests to `/v1/` through that have a key and find a place; counts all responses.

    Args:
        app: what is guarded.
        exposure: keys, any of which opens, and limits.
        metrics: where responses are counted.

    """

    def __init__(self, app: ASGIApp, exposure: Exposure, metrics: Metrics) -> None:
        self._app, self._exposure, self._metrics = app, exposure, metrics
        self._keys = [key.encode() for key in exposure.keys]
        self._num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._counted(scope, send)
        if not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        error = self._turned_away(scope)
        if error is not None:
            await error.response(scope, receive, send)
            return
        self._num_inside += 1
        try:
            await self._app(scope, _limited(receive, self._exposure.max_body_bytes), send)
        finally:
            self._num_inside -= 1

    def _turned_away(self, scope: Scope) -> ApiError | None:
        if self._keys:
            words = Headers(scope=scope).get("authorization", "").split(" ", 1)
            given = words[-1].strip().encode() if words[0].lower() == "bearer" else b""
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                message = "an API key is needed: Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
        most_bytes, most = self._exposure.max_body_bytes, self._exposure.max_requests
        size = Headers(scope=scope).get("content-length", "")
        if size.isdecimal() and int(size[:20]) > most_bytes:
            return ApiError(413, _too_long(most_bytes))
        if self._num_inside >= most:
            message = f"{most} requests are being served, as many as may"
            return ApiError(429, message, code="overloaded", retry_after_s=1)
        return None

    def _counted(self, scope: Scope, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # not the path: clients may make up any number of those
                path = getattr(route, "path", "other")
                self._metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        return counted


def _limited(receive: Receive, most_bytes: int) -> Receive:
    """Gives up on a body that is too long or does not come."""
    is_whole, num_bytes = False, 0

    async def piece() -> Message:
        nonlocal is_whole, num_bytes
        if is_whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), _BODY_S)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {_BODY_S:g} s") from None
        is_whole = not message.get("more_body", False)
        num_bytes += len(message.get("body", b""))
        if num_bytes > most_bytes:
            raise HTTPException(413, _too_long(most_bytes))
        return message

    return piece


def _too_long(most_bytes: int) -> str:
    return f"the body is too long: up to {most_bytes} bytes"
