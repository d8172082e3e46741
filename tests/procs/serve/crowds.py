"""Crowds of odd clients: random and malformed requests, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, NamedTuple

import httpx2
import hypothesis
import schemathesis

DOCUMENTED = {200, 400, 401, 404, 405, 408, 413, 429, 503}
_NUMBERS = [b"NaN", b"-Infinity", b"1e999", b"1e-320", b"[]", b"9" * 400]
PATHS = ("/v1/completions", "/v1/chat/completions")


class Sent(NamedTuple):
    """A request as bytes."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class Odd(NamedTuple):
    """An answer that the documentation does not have."""

    sent: Sent
    status: int
    text: str


def schema_requests(url: str, count: int, seed: int) -> Iterator[Sent]:
    """Requests that the server's own OpenAPI document allows, drawn by schemathesis."""
    document = httpx2.get(url + "/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    for number, path in enumerate(PATHS):
        found: list[Sent] = []

        def take(case: Any, path: str = path, found: list[Sent] = found) -> None:
            body = json.dumps(case.body, default=str).encode()
            found.append(Sent("POST", path, body, {"Content-Type": "application/json"}))

        share = count * (number + 1) // len(PATHS) - count * number // len(PATHS)
        if share:
            _drawn(schema[path]["POST"].as_strategy(), take, share, seed + number)()
        yield from found


def _drawn(strategy: Any, take: Callable[[Any], None], count: int, seed: int) -> Callable[[], None]:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
        database=None,
        deadline=None,
    )
    @hypothesis.given(strategy)
    def draw(case: Any) -> None:
        take(case)

    return draw


def malformed(sent: Sent, draws: random.Random) -> Sent:
    """The request with something broken that no schema allows."""
    body, headers, path, method = sent.body, dict(sent.headers), sent.path, sent.method
    place = draws.randrange(len(body) + 1)
    match draws.randrange(9):
        case 0:
            body = body[:place]
        case 1:
            body = body[:place] + bytes([draws.randrange(256)]) + body[place + 1 :]
        case 2:
            body = b"[" * draws.randrange(3000) + body
        case 3:
            body = body.replace(b'"', b"'")
        case 4:
            headers["Content-Type"] = draws.choice(["", "text/plain", "application/xml", "a/b;c"])
        case 5:
            body = body[:1] + b'"temperature": %s, ' % draws.choice(_NUMBERS) + body[1:]
        case 6:
            path = draws.choice([path + "/", "/v1/", "/v1/models/" + "x" * place, "/%00", "//"])
        case 7:
            method = draws.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
        case _:
            body = bytes(draws.randrange(256) for _ in range(draws.randrange(100)))
    return Sent(method, path, body, headers)


def send_all(
    url: str, requests: Iterator[Sent], num_threads: int = 8
) -> tuple[Counter[int], list[Odd]]:
    """Sends requests side by side; statuses, and the answers that are not documented."""
    statuses: Counter[int] = Counter()
    odd: list[Odd] = []
    room = BoundedSemaphore(4 * num_threads)

    def send(sent: Sent) -> None:
        try:
            found = client.request(sent.method, sent.path, content=sent.body, headers=sent.headers)
            statuses[found.status_code] += 1
            if found.status_code not in DOCUMENTED or _is_no_answer(found):
                odd.append(Odd(sent, found.status_code, found.text[:500]))
        except Exception as error:
            odd.append(Odd(sent, 0, repr(error)))
        finally:
            room.release()

    with (
        httpx2.Client(base_url=url, timeout=120) as client,
        ThreadPoolExecutor(num_threads) as pool,
    ):
        for sent in requests:
            room.acquire()
            pool.submit(send, sent)
    return statuses, odd


def _is_no_answer(found: httpx2.Response) -> bool:
    """Whether the body is neither an answer nor an error of OpenAI's form."""
    if found.request.method == "HEAD":
        return False
    if found.status_code != 200:
        return "error" not in found.json()
    if found.headers["content-type"].startswith("text/event-stream"):
        return not found.text.endswith("data: [DONE]\n\n") or '{"error"' in found.text
    return "error" in found.json()


async def leave(client: httpx2.AsyncClient, draws: random.Random, most_tokens: int) -> None:
    """Asks for something long and leaves: before, in or behind the answer."""
    body = {"prompt": [draws.randrange(1, 50)] * draws.randint(1, 40), "max_tokens": most_tokens,
            "n": draws.randint(1, 2), "stream": draws.random() < 0.7}  # fmt: skip
    patience_s = draws.choice([0, 0.001, 0.01, 0.05, 0.2]) + 0.005
    try:
        async with (
            asyncio.timeout(patience_s),
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for _ in response.aiter_lines():
                if draws.random() < 0.1:
                    return
    except (TimeoutError, httpx2.HTTPError):
        pass


async def stay(client: httpx2.AsyncClient, prompt: Sequence[int], num_tokens: int) -> str:
    """The text of a stream to its end."""
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "stream": True}
    text, ends = "", []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == ["length"], ends
    return text


async def crowd(
    url: str, stays: Sequence[Sequence[int]], num_tokens: int, num_leavers: int, seed: int
) -> list[str]:
    """The texts of those who stay while others come and leave, ten at a time."""
    draws = random.Random(seed)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        staying = [asyncio.create_task(stay(client, ids, num_tokens)) for ids in stays]
        for _ in range(num_leavers // 10):
            await asyncio.gather(*(leave(client, draws, 2 * num_tokens // 3) for _ in range(10)))
        return await asyncio.gather(*staying)
