"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from triptych.errors import InputError, TriptychError, nearest
from triptych.serve.core.request import Refusal
from triptych.serve.http.bodies import ChatBody, CompletionBody
from triptych.serve.http.client import GroupLost, Refused

_SHOWN = 80
"""Characters of a wrong value that a message repeats."""
_BACK_S = 5.0
"""After which a group that was lost is usually there again."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> Response:
        """The whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.document, self.status, headers)


def json_response(
    document: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII: a message may repeat what is no valid text."""
    return Response(json.dumps(document), status, dict(headers or {}), "application/json")


def of_refusal(refusal: Refusal) -> ApiError:
    """Come back later, or never."""
    if refusal.retry_after_s is None:
        code = "context_length_exceeded" if "context limit" in refusal.message else None
        return ApiError(400, refusal.message, code=code)
    return ApiError(429, refusal.message, code="overloaded", retry_after_s=refusal.retry_after_s)


def of_failure(error: BaseException) -> ApiError:
    """What an exception says to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return of_refusal(error.refusal)
    if isinstance(error, InputError):
        return ApiError(400, "; ".join(_line(problem) for problem in error.problems))
    if isinstance(error, GroupLost):
        return ApiError(503, str(error), code="group_lost", retry_after_s=_BACK_S)
    if isinstance(error, TriptychError):
        return ApiError(503, f"the server has ended: {error}", code="engine_lost")
    return ApiError(500, "an error of the server; its log has the cause")


def _line(problem: Any) -> str:
    return f"{problem.what}; works: {problem.works}" if problem.works else str(problem.what)


def answer_errors(app: FastAPI) -> None:
    """Every error of an application gets this form."""

    async def known(_: Request, error: Exception) -> Response:
        return of_failure(error).response

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(error.status_code, message).response
        response.headers.update(error.headers or {})
        return response

    for kind in (ApiError, Refused, TriptychError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)


def of_validation(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """All broken rules of a body, those of one field together."""
    rules: dict[str, list[str]] = {}
    for fault in faults:
        place = [str(part) for part in fault["loc"] if part not in ("body", "query", "path")]
        field = ".".join(part for part in place[:4] if not part.startswith(("list[", "function-")))
        rule = _rule(fault, field)
        name, colon, rest = rule.partition(": ")
        if not field and colon and name.isidentifier():  # of several fields, the first
            field, rule = name, rest
        rules.setdefault(field or "body", []).append(rule)
    lines = [f"{field}: {' | '.join(dict.fromkeys(found))}" for field, found in rules.items()]
    return ApiError(400, "; ".join(lines[:20]), param=next(iter(rules), None))


def _rule(fault: Mapping[str, Any], field: str) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        close = nearest(field[:_SHOWN], {*ChatBody.model_fields, *CompletionBody.model_fields}, 1)
        return "unknown or not supported" + (f"; did you mean {close[0]}?" if close else "")
    if fault["type"] in ("missing", "value_error", "json_invalid"):
        return message
    return f"{message} (given {_shown(fault.get('input'))})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
