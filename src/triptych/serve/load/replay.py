"""Sends the requests of a trace to an OpenAI-compatible server and writes their lives down.

Those of a trace with several models go to the models of its names.

Open loop: each request is sent at its time, however late the others are. Times count from when a
request was due, so a slow sender shows in them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from triptych.errors import RunError
from triptych.serve.core.request import State
from triptych.simulate.replica import Record
from triptych.simulate.trace import Trace

_REFUSALS = (429, 503)
_GRACE_S = 0.2
"""Seconds from the start to the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server.

    Args:
        url: with the `/v1` at its end.
        model: None: the first one that it lists.
        api_key: None: none.
        timeout_s: seconds that a request may take.

    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0

    def connect(self) -> httpx2.AsyncClient:
        """A client without limits of its own."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=self.timeout_s
        )


@dataclass(slots=True)
class Outcome:
    """What became of all requests; `lag_s` is how late the latest one was sent."""

    model: str
    records: list[Record]
    faults: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # by request, as far as they came
    lag_s: float = 0.0


def random_prompts(
    trace: Trace, ids: tuple[int, int], rng: np.random.Generator
) -> Iterator[list[int]]:
    """Token ids for each request, evenly from `ids` (the upper bound excluded)."""
    for size in trace.prompt_tokens.tolist():
        yield rng.integers(*ids, size).tolist()


async def replay(
    target: Target,
    trace: Trace,
    prompts: Sequence[list[int]],
    extra: dict[str, Any],
    on_end: Callable[[Record], None] = lambda _: None,
) -> Outcome:
    """Sends all requests at their times.

    Args:
        target: the server.
        trace: when, and how long prompts and answers are.
        prompts: token ids of each.
        extra: what bodies have besides, such as `{"ignore_eos": True}`.
        on_end: gets each request as it ends.

    Raises:
        RunError: if there is no server, or no request got an answer.

    """
    async with target.connect() as client:
        names = [name for name in trace.models if name]
        outcome = Outcome(" ".join(names) or target.model or await _first_model(client), [])
        start_s = time.monotonic() + _GRACE_S
        sender = _Sender(client, outcome, extra, start_s)
        async with asyncio.TaskGroup() as tasks:
            for number, prompt in enumerate(prompts):
                record = Record(
                    number,
                    "default",
                    float(trace.arrival_s[number]),
                    len(prompt),
                    int(trace.output_tokens[number]),
                )
                outcome.records.append(record)
                model = trace.models[trace.model[number]] or outcome.model
                tasks.create_task(sender.send(record, model, prompt, on_end))
    if not any(record.state is State.FINISHED for record in outcome.records):
        raise RunError(f"no request got an answer; the first: {outcome.faults[0]}")
    return outcome


async def _first_model(client: httpx2.AsyncClient) -> str:
    try:
        response = await client.get("/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise RunError(f"no models at {client.base_url}: {error or type(error).__name__}") from None


class _Sender:
    """Sends requests and fills in their records."""

    def __init__(
        self, client: httpx2.AsyncClient, outcome: Outcome, extra: dict[str, Any], start_s: float
    ) -> None:
        self._client, self._outcome, self._extra = client, outcome, extra
        self._start_s = start_s

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def send(
        self, record: Record, model: str, prompt: list[int], on_end: Callable[[Record], None]
    ) -> None:
        """The life of one request."""
        await asyncio.sleep(max(0.0, record.arrival_s - self._now_s()))
        self._outcome.lag_s = max(self._outcome.lag_s, self._now_s() - record.arrival_s)
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": record.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if not body["stream"]:
            del body["stream_options"]
        try:
            async with self._client.stream("POST", "/completions", json=body) as response:
                if response.status_code != 200:
                    await self._refused(record, response)
                elif body["stream"]:
                    await self._listen(record, response)
                else:
                    await self._read(record, response)
        except (httpx2.HTTPError, ValueError) as error:
            self._fault(record, str(error) or type(error).__name__)
        on_end(record)

    async def _refused(self, record: Record, response: httpx2.Response) -> None:
        text = (await response.aread()).decode(errors="replace")
        self._outcome.faults.append(f"{response.status_code} {text[:300]}")
        if response.status_code in _REFUSALS:
            record.state = State.REFUSED

    async def _read(self, record: Record, response: httpx2.Response) -> None:
        """Takes in a whole answer, whose first token came with its last."""
        found = json.loads(await response.aread())
        record.first_token_s = record.finish_s = self._now_s()
        record.num_tokens = found["usage"]["completion_tokens"]
        record.state = State.FINISHED
        self._outcome.texts[record.request_id] = found["choices"][0]["text"]

    async def _listen(self, record: Record, response: httpx2.Response) -> None:
        """Takes in a stream. The server counts tokens; if it does not, chunks are counted."""
        num_chunks, usage = 0, None
        texts = self._outcome.texts
        async for event in _events(response):
            if "error" in event:
                self._fault(record, json.dumps(event["error"])[:300])
                return
            usage = event.get("usage") or usage
            if event.get("choices"):
                said = texts.get(record.request_id, "")
                texts[record.request_id] = said + (event["choices"][0].get("text") or "")
                record.finish_s = self._now_s()
                if num_chunks == 0:
                    record.first_token_s = record.finish_s
                num_chunks += 1
        record.num_tokens = usage["completion_tokens"] if usage else num_chunks
        if num_chunks:
            record.state = State.FINISHED
        else:
            self._fault(record, "a stream without text")

    def _fault(self, record: Record, text: str) -> None:
        self._outcome.faults.append(f"request {record.request_id}: {text}")


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
