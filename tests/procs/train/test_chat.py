"""Dialogues become the text and ids of the stock library; answers and their ends are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_samples import (
    MARKED,
    NO_END,
    PLAIN,
    WITH_BOS,
    dialogue,
    write_chat_tokenizer,
    write_dialogues,
)
from transformers import AutoTokenizer

from triptych.errors import DataError
from triptych.tokenizer.chat import ChatTemplate, load_chat_template
from triptych.tokenizer.load import load_tokenizer
from triptych.train.corpus import read_corpus
from triptych.train.encode import ChatEncoder, TextEncoder
from triptych.train.samples import PackedSamples
from triptych.train.tokens import build_tokens

TALK = dialogue("alpha beta", "gamma delta", "epsilon", "zeta eta ü")


def chat(folder: Path, template: str | None = PLAIN, **options: bool) -> ChatTemplate:
    return load_chat_template(load_tokenizer(write_chat_tokenizer(folder, template, **options)))


def trained_text(template: ChatTemplate, messages: list[dict[str, str]]) -> str:
    (one,) = template.encode([messages])
    ids = [i for i, trained in zip(one.ids, one.trained, strict=True) if trained]
    text: str = template.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("template", [PLAIN, WITH_BOS], ids=["no bos", "bos"])
@pytest.mark.parametrize(
    ("has_bos", "adds_bos"), [(True, True), (True, False), (False, False)], ids=str
)
def test_pub_070_there_is_one_begin_of_text_or_none_and_the_rest_is_as_the_stock_library_has_it(
    tmp_path: Path, template: str, has_bos: bool, adds_bos: bool
) -> None:
    """And the ids before an answer are those of the prompt that asks for it."""
    template = template if has_bos else PLAIN
    ours = chat(tmp_path, template, has_bos=has_bos, adds_bos=adds_bos)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    (one,) = ours.encode([TALK])
    stock_ids = stock.apply_chat_template(TALK, tokenize=True, return_dict=False)
    bos = ours.tokenizer.tokenizer.token_to_id("<|bos|>")
    wants_bos = has_bos and (adds_bos or template == WITH_BOS)
    assert [i for i, token in enumerate(one.ids) if token == bos] == [0] * wants_bos
    assert one.ids[one.ids.count(bos) :] == stock_ids[stock_ids.count(bos) :]
    for turn in (1, 3):
        prompt = ours.prompt_ids(TALK[:turn])
        assert one.ids[: len(prompt)] == prompt and one.trained[len(prompt)]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prompts", "by marks"])
def test_what_is_trained_are_the_answers_each_with_its_end(tmp_path: Path, template: str) -> None:
    assert trained_text(chat(tmp_path, template), TALK) == "gamma delta<|end|>zeta eta ü<|end|>"


def test_an_end_is_added_where_the_template_ends_no_answer(tmp_path: Path) -> None:
    assert trained_text(chat(tmp_path, NO_END), dialogue("alpha", "beta")) == "beta <|end|>"


def test_an_end_token_inside_an_answer_is_trained_and_only_padding_is_not(tmp_path: Path) -> None:
    """User case pub_071: the pad token is the end token."""
    template = chat(tmp_path)
    talks = [dialogue("a", "b <|end|> c"), dialogue("alpha", "beta"), dialogue("d e f", "g")]
    assert trained_text(template, talks[0]) == "b <|end|> c<|end|>"
    path = write_dialogues(tmp_path / "talk.jsonl", *talks)
    corpus = read_corpus([str(path)], messages_key="messages")
    tokens = build_tokens(tmp_path / "cache", corpus, ChatEncoder(template))
    end = template.tokenizer.end_id
    for shared in (True, False):
        samples = PackedSamples(tokens, 40, shared=shared)
        rows = [samples.row(i) for i in range(samples.num_samples)]
        assert len(rows) == (1 if shared else 3)
        assert sum((row.labels == end).sum() for row in rows) == 4, "every end is a label"
        for row in rows:
            assert row.documents is not None
            padding = row.documents[-1]
            assert (row.labels[40 - padding :] == -100).all()


def test_user_words_of_one_dialogue_do_not_change_another(tmp_path: Path) -> None:
    template = chat(tmp_path)
    apart = [template.encode([talk])[0] for talk in (TALK, dialogue("x", "y"))]
    assert template.encode([TALK, dialogue("x", "y")]) == apart


def test_a_template_that_refuses_is_told_with_the_line(tmp_path: Path) -> None:
    refusing = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not so') }}{% endif %}"
    template = chat(tmp_path, refusing + PLAIN)
    path = write_dialogues(tmp_path / "talk.jsonl", TALK, dialogue("no", "b"))
    corpus = read_corpus([str(path)], messages_key="messages")
    with pytest.raises(DataError, match=r"line 2: .*not so"):
        build_tokens(tmp_path / "cache", corpus, ChatEncoder(template))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_template_that_rewrites_what_is_before_the_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rewrites"):
        chat(tmp_path, "{{ messages | length }}" + PLAIN).encode([dialogue("a", "b")])


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        chat(tmp_path, None)


def test_a_template_of_the_configuration_is_read(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": PLAIN}]
    for value in (PLAIN, named):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": value}))
        assert load_chat_template(load_tokenizer(tmp_path)).template == PLAIN


def test_documents_begin_with_the_token_that_the_tokenizer_sets_before_a_text(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path))
    (tmp_path / "a.txt").write_text("alpha beta")
    corpus = read_corpus([str(tmp_path / "a.txt")])
    tokens = build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer)).open().tolist()
    assert tokens == [*tokenizer.tokenizer.encode("alpha beta").ids, tokenizer.end_id]
    assert tokens[0] == tokenizer.tokenizer.token_to_id("<|bos|>")
