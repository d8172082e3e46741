"""OpenAI's own client before the server: what the engine says, in the forms that it expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from http_samples import NAME, TEMPLATE, Server, serving
from serve_samples import (
    END,
    PROMPTS,
    byte_tokenizer,
    config_of,
    save_model,
    set_end_token,
    stock_greedy,
)

from triptych.serve.http.exposure import Exposure

HELLO = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    made = save_model(folder, config_of(vocab_size=byte_tokenizer().get_vocab_size()))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, made


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any]) -> Iterator[Server]:
    with serving(model[0], exposure=Exposure(keys=["secret"])) as server:
        yield server
        assert server.load.num_free_blocks == server.engine.limits.num_blocks


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client(api_key="secret")


def ask(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 12, **options}
    return client.completions.create(model=NAME, prompt=prompt, **options)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 12, "messages": HELLO, **options}
    return client.chat.completions.create(model=NAME, **options)


def test_completions_are_the_stock_models_greedy_text(
    server: Server, client: openai.OpenAI, model: tuple[Path, Any]
) -> None:
    tokenizer = server.prompter.tokenizer
    found = ask(client, PROMPTS)
    for choice, prompt in zip(found.choices, PROMPTS, strict=True):
        ids = tokenizer.encode(prompt).ids
        limit = tokenizer.get_vocab_size()
        tokens = stock_greedy(model[1], ids, 12, limit)
        whole = tokenizer.decode([*ids, *tokens])
        assert prompt + choice.text == whole and choice.finish_reason == "length"
    sizes = [len(tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert found.usage.prompt_tokens == sum(sizes)
    assert found.usage.completion_tokens == 36
    ids = tokenizer.encode(PROMPTS[0]).ids
    assert ask(client, ids).choices[0].text == found.choices[0].text


def test_a_chat_continues_the_rendered_template(client: openai.OpenAI) -> None:
    text = f"<user>{HELLO[0]['content']}\n<assistant>"
    answer = chat(client)
    assert answer.choices[0].message.content == ask(client, text).choices[0].text
    assert answer.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "import "}] * 1
              + [{"type": "text", "text": "os"}]}]  # fmt: skip
    assert chat(client, messages=parts).choices == answer.choices


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1, "seed": 5}, {"stop": "o"}])
def test_a_streams_pieces_are_the_whole_answer(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    for create, text_of in ((ask, lambda c: c.text), (chat, lambda c: c.delta.content or "")):
        arguments = {"prompt": "for i in"} if create is ask else {}
        whole = create(client, **arguments, **options)
        texts, ends = [""] * len(whole.choices), [None] * len(whole.choices)
        for chunk in create(client, **arguments, **options, stream=True):
            (choice,) = chunk.choices
            assert ends[choice.index] is None, "a chunk after the end"
            texts[choice.index] += text_of(choice)
            ends[choice.index] = choice.finish_reason
        wanted = [getattr(c, "text", None) or c.message.content for c in whole.choices]
        assert texts == wanted
        assert ends == [choice.finish_reason for choice in whole.choices]


def test_seeds_decide_draws_and_choices_differ(client: openai.OpenAI) -> None:
    first = ask(client, "x", n=4, temperature=1, seed=3)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    again = ask(client, "x", n=4, temperature=1, seed=3)
    assert [choice.text for choice in again.choices] == texts
    assert ask(client, "x", temperature=1, seed=3).choices[0].text == texts[0]


@pytest.mark.parametrize("prompt", ["\n def", "  日本 x", "a"])
def test_echoed_log_probabilities_are_the_models_own_and_join_to_the_text(
    server: Server, client: openai.OpenAI, model: tuple[Path, Any], prompt: str
) -> None:
    """pub_088."""
    for count in (0, 1, 5):
        choice = ask(client, prompt, echo=True, logprobs=count, max_tokens=4).choices[0]
        found = choice.logprobs
        assert choice.text.startswith(prompt) and "".join(found.tokens) == choice.text
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
        ids = server.prompter.tokenizer.encode(prompt).ids
        ids += stock_greedy(model[1], ids, 4, server.prompter.tokenizer.get_vocab_size())
        with torch.no_grad():
            logits = model[1](input_ids=torch.tensor([ids])).logits[0]
        wanted = torch.log_softmax(logits, dim=1)[range(len(ids) - 1), ids[1:]].tolist()
        values = found.token_logprobs
        assert values[0] is None and len(values) == len(ids)
        assert values[1:] == pytest.approx(wanted, abs=1e-4)
        if count:
            sizes = [len(likeliest) for likeliest in found.top_logprobs[1:]]
            assert found.top_logprobs[0] is None and set(sizes) <= set(range(1, count + 1))
        else:
            assert found.top_logprobs is None
        only = ask(client, prompt, echo=True, logprobs=count, max_tokens=0).choices[0]
        assert only.text == prompt and only.logprobs.token_logprobs == values[: len(ids) - 4]
    assert ask(client, prompt, echo=True, max_tokens=4).choices[0].text == choice.text


def test_chat_log_probabilities_carry_bytes_that_make_the_text(client: openai.OpenAI) -> None:
    """pub_087: also where characters are spread over tokens."""
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 1, "seed": 1, "max_tokens": 40}
    choice = chat(client, **options).choices[0]
    found = choice.logprobs.content
    whole = b"".join(bytes(entry.bytes) for entry in found)
    assert whole.decode(errors="replace") == choice.message.content
    assert "�" in choice.message.content  # random bytes: the case is not empty
    assert all("�" not in entry.token and len(entry.top_logprobs) == 3 for entry in found)
    streamed = [c.choices[0].logprobs for c in chat(client, **options, stream=True)]
    assert [entry for part in streamed if part for entry in part.content] == found


def test_an_answer_ends_before_a_stop_text(client: openai.OpenAI) -> None:
    whole = ask(client, "import ", max_tokens=30).choices[0].text
    stop = whole[5:8]
    choice = ask(client, "import ", max_tokens=30, stop=[stop, "never"]).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    ends = ask(client, "import ", max_tokens=30, stop=stop, logprobs=0).choices[0]
    assert "".join(ends.logprobs.tokens) == ends.text == choice.text


def test_a_stop_token_ends_the_answer(
    client: openai.OpenAI, server: Server, model: tuple[Path, Any]
) -> None:
    tokenizer = server.prompter.tokenizer
    ids = tokenizer.encode("os.").ids
    tokens = stock_greedy(model[1], ids, 10, tokenizer.get_vocab_size())
    body = {"stop_token_ids": [tokens[3]]}
    choice = ask(client, "os.", max_tokens=10, extra_body=body).choices[0]
    shown = tokens[: tokens.index(tokens[3])]
    assert "os." + choice.text == tokenizer.decode([*ids, *shown])
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("create", [ask, chat])
@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stop": ["e", "n"], "max_tokens": 20}])
def test_usage_comes_once_at_the_end_of_a_stream_that_asks_for_it(
    client: openai.OpenAI, create: Any, options: dict[str, Any]
) -> None:
    """pub_093."""
    arguments = {"prompt": "def f"} if create is ask else {}
    usage = create(client, **arguments, **options).usage
    with_it = list(
        create(client, **arguments, **options, stream=True, stream_options={"include_usage": True})
    )
    assert with_it[-1].usage == usage and with_it[-1].choices == []
    assert all(chunk.usage is None and chunk.choices for chunk in with_it[:-1])
    without = list(create(client, **arguments, **options, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in without)
    assert len(without) == len(with_it) - 1


def test_a_schema_makes_the_answer_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "ab", "schema": schema}}
    answer = chat(client, response_format=wanted, max_tokens=60, temperature=1, seed=2)
    found = json.loads(answer.choices[0].message.content)
    assert found.keys() == {"a", "b"} and found["b"] in ("x", "y")
    numbers = {"type": "regex", "regex": "[0-9]{3}-[a-c]+z"}
    text = ask(client, "x", extra_body={"response_format": numbers}, max_tokens=30, n=2,
               logit_bias={}, temperature=1, seed=1).choices[1].text  # fmt: skip
    assert text[:3].isdigit() and text[3] == "-" and set(text[4:]) <= set("abcz")


def test_models_are_listed_with_the_limit_that_is_enforced(
    client: openai.OpenAI, server: Server
) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and model.max_model_len == server.engine.limits.context == 96
    assert client.models.retrieve(NAME) == model
    for call in (lambda: client.models.retrieve("gpt"), lambda: chat(client, model="gpt")):
        with pytest.raises((openai.NotFoundError, TypeError), match=r"tiny|multiple"):
            call()
    with pytest.raises(openai.NotFoundError, match=r"'gpt'.*'tiny'") as raised:
        client.completions.create(model="gpt", prompt="x")
    assert raised.value.code == "model_not_found" and raised.value.param == "model"


def test_without_the_key_nothing_is_answered(server: Server) -> None:
    for key in ("wrong", "", "secret2"):
        with pytest.raises((openai.AuthenticationError, openai.OpenAIError)):
            ask(server.client(api_key=key), "x")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "empty list"),
        ({"prompt": [""]}, "no tokens"),
        ({"prompt": ["a", ""]}, "no tokens"),
        ({"prompt": [[]]}, "no tokens"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [5, 311]}, "from 0 to 2"),
        ({"prompt": [-1]}, "from 0 to 2"),
        ({"prompt": ["a"] * 300}, "up to 256"),
        ({"prompt": ["a"] * 90, "n": 3}, "90 prompts with n = 3; up to 256"),
        ({"max_tokens": 96}, "at most 95 would fit"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": "a" * 97}, "97 tokens; the context limit is 96"),
        ({"n": 0}, "n: "),
        ({"temperature": -0.5, "top_p": 0, "foo": 1}, "temperature.*top_p.*foo"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"temperature": "1"}, "valid number"),
        ({"stop": ["a", ""]}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "'x' is no token id"),
        ({"logit_bias": {"400": 1}}, "logit_bias has token 400"),
        ({"logit_bias": {"4": 101}}, "from -100 to 100"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "json_schema"}}, "needs the key"),
        ({"response_format": {"type": "regex", "regex": "("}}, "regex cannot be"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"suffix": "x"}, "suffix: unknown or not supported"),
        ({"prompt": "\ud800"}, "prompt"),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_what_is_wrong(
    server: Server, client: openai.OpenAI, body: dict[str, Any], words: str
) -> None:
    """pub_084, pub_085: 400 with the reason, streaming or not, and the server goes on."""
    for stream in (False, True):
        data = json.dumps({"prompt": "a", "stream": stream, **body}).encode()
        with pytest.raises(openai.BadRequestError, match=words) as raised:
            client.post("/completions", content=data, cast_to=object,
                        options={"headers": {"Content-Type": "application/json"}})  # fmt: skip
        assert raised.value.type == "invalid_request_error"
    assert ask(client, "a", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, r"messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 3}, "only with logprobs"),
        ({"tools": [{"type": "function"}]}, "tools: unknown or not supported"),
        ({"max_completion_tokens": 500}, "context limit is 96"),
    ],
)
def test_a_bad_chat_is_told_what_is_wrong(
    client: openai.OpenAI, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.post("/chat/completions", body={"messages": HELLO, **body}, cast_to=object)


def test_what_only_streams_have_is_refused_without_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="only with stream"):
        ask(client, "a", stream_options={"include_usage": True})


def test_at_the_limit_an_answer_is_as_long_as_there_is_room(client: openai.OpenAI) -> None:
    """pub_085: limit - 1 has room for a token, limit for none: reason length."""
    for room in (0, 1, 2):
        ids = [7] * (96 - room)
        for options in ({"max_tokens": room}, {"max_tokens": room, "stream": True}):
            found = ask(client, ids, **options)
            found = list(found)[-1] if "stream" in options else found
            assert found.choices[0].finish_reason == "length"
        assert ask(client, ids, max_tokens=room).usage.completion_tokens == room


def test_what_the_model_says_ends_with_its_end_token(tmp_path: Path) -> None:
    made = save_model(tmp_path, config_of())
    with serving(tmp_path) as server:
        client, tokenizer = server.client(), server.prompter.tokenizer
        with pytest.raises(openai.BadRequestError, match="no chat"):
            chat(client)
    ids = tokenizer.encode("os.").ids
    tokens = stock_greedy(made, ids, 10, tokenizer.get_vocab_size())
    set_end_token(tmp_path, tokens[4])
    with serving(tmp_path) as server:
        choice = ask(server.client(), "os.").choices[0]
        end = tokens.index(tokens[4])
        whole = tokenizer.decode([*ids, *tokens[:end]])
        assert "os." + choice.text == whole and choice.finish_reason == "stop"
        ignoring = ask(server.client(), "os.", max_tokens=10, extra_body={"ignore_eos": True})
        assert ignoring.choices[0].finish_reason == "length"
