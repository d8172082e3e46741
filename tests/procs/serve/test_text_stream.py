"""Streaming text: pieces add up to the decoded text, whatever the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_samples import END, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from triptych.serve.engine.text import TextStream

BYTES = byte_tokenizer()


def stream(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    text = TextStream(tokenizer, prompt_ids)
    pieces = [text.add(token_id) for token_id in ids]
    pieces.append(text.finish())
    assert "".join(pieces) == text.text
    return pieces


@given(st.text(max_size=12), st.text(max_size=12))
@settings(max_examples=200)
def test_the_pieces_of_any_text_add_up_to_it(prompt: str, text: str) -> None:
    pieces = stream(BYTES, BYTES.encode(prompt).ids, BYTES.encode(text).ids)
    assert "".join(pieces) == text


@given(st.text(max_size=6), st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=12))
@settings(max_examples=300)
def test_the_pieces_of_any_tokens_add_up_to_what_they_decode_to(
    prompt: str, ids: list[int]
) -> None:
    prompt_ids = BYTES.encode(prompt).ids
    pieces = stream(BYTES, prompt_ids, ids)
    assert prompt + "".join(pieces) == BYTES.decode([*prompt_ids, *ids])


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = BYTES.encode("é🎉").ids
    pieces = stream(BYTES, BYTES.encode("a").ids, ids)
    assert [piece for piece in pieces if piece] == ["é", "🎉"]


@pytest.mark.parametrize("prompt", ["Hello", ""])
def test_the_space_before_a_word_is_kept_after_a_prompt(prompt: str) -> None:
    """Decoders of the SentencePiece kind drop the space of the first token of a text only."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    prompt_ids = tokenizer.encode(prompt).ids if prompt else []
    pieces = stream(tokenizer, prompt_ids, [2, 2])
    assert prompt + "".join(pieces) == tokenizer.decode([*prompt_ids, 2, 2])


def test_special_tokens_are_not_text() -> None:
    end = BYTES.token_to_id(END)
    ids = [end, *BYTES.encode("ab").ids, end, end]
    assert "".join(stream(BYTES, BYTES.encode("x").ids, ids)) == "ab"
