"""What a server does under pressure and at odd moments; no model runs here."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from crowds import crowd, malformed, schema_requests, send_all
from fake_engine import alone
from http_samples import NAME, TEMPLATE, Server, serving
from scripted import Scripted, engine_of, table_engine, tokenizer_folder
from serve_samples import END, byte_tokenizer
from tokenizers import processors

from triptych.errors import RunError
from triptych.serve.core.check import broken_invariants
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass, Request
from triptych.serve.engine.engine import Engine
from triptych.serve.http.exposure import Exposure

TOKENIZER = byte_tokenizer()
SMALL = Limits(num_blocks=32, block_size=4, model_context=112, max_running=16, token_budget=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """Its answers show every fault of tables, copies, reuse and preemption."""
    with serving(folder, open_engine=lambda: table_engine(SMALL)) as server:
        yield server
        settled(server)
        assert broken_invariants(server.engine.scheduler) == []


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    """Its answers are `%%%...`."""
    exposure, run = Exposure(max_body_bytes=20_000), Scripted(lambda *_: 5)
    with serving(folder, exposure=exposure, open_engine=lambda: engine_of(run, SMALL)) as server:
        yield server
        settled(server)


def settled(server: Server) -> None:
    """Waits until nobody lives, and nothing is left behind anywhere."""
    wait_for(lambda: not server.engine.is_busy and server.service.fleet.num_living == 0)
    assert server.engine.load.num_free_blocks == server.engine.limits.num_blocks
    assert server.engine._asks == {} and server.engine._asked == {}


def wait_for(condition: Any, seconds: float = 60) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.002)


def post(server: Server, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return httpx2.post(server.url + path, content=data, headers=headers, timeout=60, **options)


def text_alone(ids: list[int], max_tokens: int, continuation: int = 0) -> str:
    """What a request says that nobody disturbs."""
    request = Request(id=0, prompt=ids, max_tokens=max_tokens)
    tokens = alone(request, SMALL.context, continuation)
    whole = TOKENIZER.decode([*ids, *tokens])
    return whole[len(TOKENIZER.decode(ids)) :]


def scripted(server_folder: Path, ids: list[int], step_s: float = 0.0005) -> Any:
    """A server whose every answer is these tokens."""
    run = Scripted(lambda request, continuation, place: ids[place])
    return serving(server_folder, open_engine=lambda: engine_of(run, SMALL, step_s))


def streamed(server: Server, **body: Any) -> tuple[list[str], str | None]:
    """The pieces of each choice joined, and the last reason."""
    texts, reason = [""] * body.get("n", 1), None
    for chunk in server.client().completions.create(model=NAME, stream=True, **body):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reason = choice.finish_reason or reason
    return texts, reason


@pytest.mark.parametrize(
    ("said", "stop", "shown", "reason"),
    [
        ("xx ab cd yy", "ab cd", "xx ", "stop"),
        ("xx ab ce yy", "ab cd", "xx ab ce yy", "length"),
        ("xx ab c", "ab cd", "xx ab c", "length"),  # held back until the end
        ("a bcd e", ["bcd", "cd e"], "a ", "stop"),
        ("a cd e", ["bcd", "cd e"], "a ", "stop"),
        ("日本語 text", "語 t", "日本", "stop"),
        ("b rest", "ab", "b rest", "length"),  # it began in the prompt
    ],
)
def test_nothing_of_a_stop_text_is_sent(
    folder: Path, said: str, stop: Any, shown: str, reason: str
) -> None:
    """pub_086."""
    ids = TOKENIZER.encode(said).ids
    with scripted(folder, ids) as server:
        body = {"prompt": "x a", "stop": stop, "max_tokens": len(ids), "n": 2}
        assert streamed(server, **body) == ([shown, shown], reason)
        whole = server.client().completions.create(model=NAME, **body)  # type: ignore[call-overload]
        assert [(c.text, c.finish_reason) for c in whole.choices] == [(shown, reason)] * 2
        settled(server)


@pytest.mark.parametrize("text", ["👩‍👩‍👧 日本 é", "日x", "a👩"])
def test_characters_come_whole_and_what_never_became_one_at_the_end(
    folder: Path, text: str
) -> None:
    """pub_087."""
    whole = TOKENIZER.encode(text).ids
    for ids, shown in ((whole, text), (whole[:-1], TOKENIZER.decode(whole[:-1]))):
        with scripted(folder, ids) as server:
            assert streamed(server, prompt="p", max_tokens=len(ids)) == ([shown], "length")
            chat = server.client().chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": "p"}],
                max_tokens=len(ids),
                logprobs=True,
            )
            assert chat.choices[0].message.content == shown
            entries = chat.choices[0].logprobs.content  # type: ignore[union-attr]
            sent = b"".join(bytes(entry.bytes or ()) for entry in entries or ())
            assert sent == text.encode()[: len(sent)] and len(entries or ()) == len(ids)


def test_one_begin_of_text_token_whoever_writes_it(tmp_path: Path) -> None:
    """pub_070: the tokenizer sets one for raw text; the template writes it, or does not."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", start)]
    )
    for number, template in enumerate((TEMPLATE, "{{ bos_token }}" + TEMPLATE)):
        made = tmp_path / str(number)
        made.mkdir()
        tokenizer_folder(made, chat_template=template, bos_token="<s>")
        tokenizer.save(str(made / "tokenizer.json"))
        with scripted(made, [5]) as server:
            chat = server.client().chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "ab"}], max_tokens=1
            )
            text = "<user>ab\n<assistant>"
            raw = server.client().completions.create(model=NAME, prompt=text, max_tokens=1)
            size = len(TOKENIZER.encode(text))
            assert chat.usage.prompt_tokens == raw.usage.prompt_tokens == size + 1  # type: ignore[union-attr]
            empty = server.client().completions.create(model=NAME, prompt="", max_tokens=1)
            assert empty.usage is not None and empty.usage.prompt_tokens == 1


def test_forty_requests_on_thirty_two_blocks_all_say_what_they_say_alone(server: Server) -> None:
    """pub_096: preemption included; what can never fit is refused at once."""
    draws = random.Random(0)
    asks = [([draws.randrange(1, 50) for _ in range(draws.randint(1, 60))],
             draws.randint(1, 50)) for _ in range(40)]  # fmt: skip
    asks = [(ids, min(most, SMALL.context - len(ids))) for ids, most in asks]

    async def all_at_once() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            calls = [
                client.completions.create(model=NAME, prompt=ids, max_tokens=most, temperature=0)
                for ids, most in asks
            ]
            return await asyncio.gather(*calls)

    for (ids, most), found in zip(asks, asyncio.run(all_at_once()), strict=True):
        assert found.choices[0].text == text_alone(ids, most)
        assert found.usage.completion_tokens == most
    assert server.engine.load.num_preemptions > 0
    with pytest.raises(openai.BadRequestError, match="context limit is 112"):
        server.client().completions.create(model=NAME, prompt=[5] * 113, max_tokens=1)


def test_clients_that_leave_free_what_they_held_and_disturb_nobody(server: Server) -> None:
    """pub_098; `benchmarks/serving_robustness.py` has a thousand of them."""
    stays = [[number, 3, 7] for number in range(1, 6)]
    found = asyncio.run(crowd(server.url, stays, num_tokens=90, num_leavers=80, seed=1))
    assert found == [text_alone(ids, 90) for ids in stays]
    settled(server)
    assert httpx2.get(server.url + "/health").json() == {"status": "ok"}


def test_the_limit_that_is_advertised_is_the_one_that_is_enforced(folder: Path) -> None:
    """pub_085: here the pool decides it, not the model."""
    limits = Limits(num_blocks=20, block_size=4, model_context=500, token_budget=48,
                    max_running=8)  # fmt: skip
    run = Scripted(lambda *_: 5)
    with serving(folder, open_engine=lambda: engine_of(run, limits)) as server:
        client = server.client()
        (model,) = client.models.list().data
        limit: int = model.max_model_len  # type: ignore[attr-defined]
        assert limit == 80
        around = TOKENIZER.encode("<user>\n<assistant>").ids
        for size in (limit - 1, limit, limit + 1, 2 * limit):
            message = [{"role": "user", "content": "a" * (size - len(around))}]
            for stream in (False, True):
                for path, body in (
                    ("/v1/completions", {"prompt": [5] * size, "max_tokens": limit - size}),
                    ("/v1/chat/completions", {"messages": message}),
                ):
                    body = {"stream": stream, **body, **({"max_tokens": 1} if size > limit else {})}
                    found = post(server, body, path)
                    if size > limit:
                        assert found.status_code == 400 and f"limit is {limit}" in found.text
                        assert found.json()["error"]["code"] == "context_length_exceeded"
                    else:
                        assert found.status_code == 200 and '"length"' in found.text
                        assert found.text.count("%") == (limit - size)
        settled(server)


def test_random_and_malformed_requests_get_documented_answers(server: Server) -> None:
    """`benchmarks/serving_robustness.py` has ten thousand of them."""
    draws, ids = random.Random(2), [7, 8, 9]
    beside = server.client().completions.create(model=NAME, prompt=ids, max_tokens=100, stream=True)
    valid = list(schema_requests(server.url, 40, seed=3))
    broken = [malformed(sent, draws) for sent in valid for _ in range(3)]
    statuses, odd = send_all(server.url, iter([*valid, *broken]))
    assert odd == [] and statuses.total() == 160 and statuses[200] and statuses[400]
    assert "".join(chunk.choices[0].text for chunk in beside) == text_alone(ids, 100)
    assert server.client().completions.create(model=NAME, prompt=ids, max_tokens=30).choices[
        0
    ].text == text_alone(ids, 30)


def test_work_for_a_client_that_leaves_stops_within_two_steps(folder: Path) -> None:
    with scripted(folder, [5] * 100, step_s=0.05) as server:
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        with httpx2.stream("POST", server.url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        ranks = server.engine._executor
        wait_for(lambda: not server.engine._asks)
        at_abort = ranks.num_steps  # type: ignore[attr-defined]
        settled(server)
        assert ranks.num_steps <= at_abort + 2  # type: ignore[attr-defined]
        assert server.service.metrics.left.labels(NAME)._value.get() == 1


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'"x"', {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400),
        (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 400),
        (b'{"prompt": "' + b"a" * 30_000 + b'"}', {}, 413),
        (b'{"prompt": "a", "max_tokens": 3, "seed": -123456789012345678901234567890}', {}, 200),
    ],
)
def test_malformed_bodies_get_an_error_of_openais_form(
    plain: Server, body: bytes, headers: dict[str, str], status: int
) -> None:
    found = post(plain, body, headers=headers)
    assert found.status_code == status
    if status != 200:
        error = found.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"]


def test_a_body_in_pieces_is_limited_too(plain: Server) -> None:
    pieces = iter([b'{"prompt": "', *[b"a" * 1000] * 40, b'"}'])
    url, headers = plain.url + "/v1/completions", {"Content-Type": "application/json"}
    found = httpx2.post(url, content=pieces, headers=headers)
    assert found.status_code == 413 and "up to 20000 bytes" in found.json()["error"]["message"]


def test_unknown_paths_get_an_error_of_openais_form(plain: Server) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/models", 405), ("/x", 404)):
        found = post(plain, b"{}", path)
        assert found.status_code == status and path in found.json()["error"]["message"]


def test_too_many_requests_are_told_when_to_come_back(folder: Path) -> None:
    limits = Limits(num_blocks=32, block_size=4, model_context=128, max_running=2, max_waiting=1,
                    token_budget=48)  # fmt: skip
    run = Scripted(lambda *_: 5)
    exposure = Exposure(max_requests=4)
    long = {"prompt": "x", "max_tokens": 100, "stream": True}
    with serving(folder, exposure=exposure, open_engine=lambda: engine_of(run, limits, 0.02)) as (
        server
    ):
        url = server.url + "/v1/completions"
        with httpx2.Client(timeout=60) as client:
            held = [client.stream("POST", url, json=long) for _ in range(4)]
            for number, stream in enumerate(held[:3]):
                wait_for(lambda: server.engine.load.num_waiting == 0)
                assert stream.__enter__().status_code == 200, number
            refused = post(server, long)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "1 requests are waiting" in refused.json()["error"]["message"]
            assert refused.json()["error"]["type"] == "rate_limit_error"
            for stream in held[:3]:
                stream.__exit__(None, None, None)
        settled(server)
        text = httpx2.get(server.url + "/metrics").text
        assert 'triptych_responses_total{path="/v1/completions",status="429"} 1.0' in text


def test_what_would_come_late_is_refused_with_a_time_to_come_back(folder: Path) -> None:
    """pub_101: a step lasts longer than the objective, which is known after the first answer."""
    policy, run = (
        Policy(classes=(LatencyClass(ttft_s=1e-3),), refuses_late=True),
        Scripted(lambda *_: 5),
    )
    with serving(folder, open_engine=lambda: engine_of(run, SMALL, 0.01, policy)) as server:
        body = {"prompt": "x", "max_tokens": 2}
        assert post(server, body).status_code == 200
        late = post(server, {**body, "stream": True})
        assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
        assert "objective of class default is 0.001 s" in late.json()["error"]["message"]
        settled(server)


def test_a_request_is_served_by_the_class_that_it_names(folder: Path) -> None:
    """While one runs, three of a patient class wait; one of the default class comes before them."""
    flex = LatencyClass(name="flex", ttft_s=60.0, priority=1)
    policy, run = Policy(classes=(LatencyClass(), flex)), Scripted(lambda *_: 5)
    limits = Limits(num_blocks=32, block_size=4, model_context=112, max_running=1, token_budget=48)
    opened = partial(engine_of, run, limits, 0.02, policy)
    with serving(folder, open_engine=opened, policy=policy) as server:
        ended: list[str] = []

        def ask(tier: str) -> None:
            body = {"prompt": "x", "max_tokens": 40, "service_tier": tier}
            found = post(server, body).json()
            ended.append(found["service_tier"])

        threads = [threading.Thread(target=ask, args=("flex",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.load.num_waiting == 3)
        ask("priority")  # OpenAI's; nobody has made that class here
        assert ended.index("default") <= 1  # the one that ran may have been set back for it
        for thread in threads:
            thread.join()
        assert sorted(ended) == ["default", "flex", "flex", "flex", "flex"]
        wrong = post(server, {"prompt": "x", "service_tier": "quick"})
        assert wrong.status_code == 400 and "default | flex" in wrong.json()["error"]["message"]
        assert httpx2.get(server.url + f"/v1/models/{NAME}").json()["service_tiers"] == [
            "default", "flex"
        ]  # fmt: skip
        settled(server)


def test_no_more_requests_are_served_at_once_than_may(folder: Path) -> None:
    exposure, run = Exposure(max_requests=1), Scripted(lambda *_: 5)
    with serving(folder, exposure=exposure, open_engine=lambda: engine_of(run, SMALL, 0.02)) as (
        server
    ):
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        with httpx2.stream("POST", server.url + "/v1/completions", json=body):
            found = post(server, {"prompt": "x"})
            assert found.status_code == 429 and "1 requests are being" in found.text
            assert httpx2.get(server.url + "/health").status_code == 200
        settled(server)


def test_the_figures_for_prometheus_are_those_of_the_requests(server: Server) -> None:
    for _ in range(3):
        post(server, {"prompt": [5, 6], "max_tokens": 11})
    found = {}
    for line in httpx2.get(server.url + "/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[re.sub(r'{(group="0",)?model="tiny"}', "", name)] = float(value)
    assert found["triptych_prompt_tokens_total"] == 6
    assert found["triptych_output_tokens_total"] == 33
    assert found["triptych_time_to_first_token_seconds_count"] == 3
    assert found["triptych_time_per_output_token_seconds_count"] == 3
    assert found["triptych_request_seconds_sum"] > 0
    assert found["triptych_kv_blocks"] == found["triptych_kv_blocks_free"] == 32
    assert found["triptych_kv_usage_ratio"] == 0 and found["triptych_requests_waiting"] == 0
    assert found['triptych_responses_total{path="/v1/completions",status="200"}'] == 3


def test_a_lost_rank_ends_all_requests_with_the_cause(folder: Path) -> None:
    broken = threading.Event()

    def script(*_: int) -> int:
        if broken.is_set():
            raise RunError("rank 3 ended with exit code -9")
        return 5

    def opened() -> Engine:
        return engine_of(Scripted(script), SMALL, 0.005)

    with serving(folder, open_engine=opened) as server:
        stream = server.client().completions.create(
            model=NAME, prompt="x", max_tokens=100, stream=True
        )
        waiting: list[Any] = []
        whole = threading.Thread(
            target=lambda: waiting.append(post(server, {"prompt": "y", "max_tokens": 100}))
        )
        whole.start()
        next(stream)
        broken.set()
        with pytest.raises(openai.APIError, match="rank 3 ended"):
            list(stream)
        whole.join()
        assert waiting[0].status_code == 503 and "rank 3 ended" in waiting[0].text
        assert post(server, {"prompt": "y"}).status_code == 503
        health = httpx2.get(server.url + "/health")
        assert health.status_code == 503 and "rank 3 ended" in health.json()["cause"]


def test_the_tokenizer_has_the_end_token(folder: Path) -> None:
    """The folder is as the other tests think it is."""
    assert TOKENIZER.token_to_id(END) == 0
