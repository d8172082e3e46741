"""The token cache: right ids, built once, whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_samples import write_text

from triptych.tokenizer.load import TextTokenizer, load_tokenizer
from triptych.train.corpus import Corpus, read_corpus
from triptych.train.encode import TextEncoder
from triptych.train.tokenizer_training import train_tokenizer
from triptych.train.tokens import Tokens, build_tokens, cached_tokens


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_text(tmp_path / "text")
    return read_corpus([str(tmp_path / "text")])


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Corpus) -> TextTokenizer:
    return load_tokenizer(train_tokenizer([tmp_path / "text"], 290, tmp_path / "tokenizer"))


def test_the_ids_are_those_of_each_document_with_an_end_after_it(
    tmp_path: Path, corpus: Corpus, tokenizer: TextTokenizer
) -> None:
    tokens = build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer))
    expected: list[int] = []
    for file in corpus.files:
        expected += tokenizer.encode([file.path.read_text()])[0] + [tokenizer.end_id]
    assert tokens.open().tolist() == expected
    assert tokens.num_tokens == len(expected)
    assert tokens.num_documents == len(corpus.files)
    assert tokens.dtype == "uint16"


def test_the_cache_is_built_once(tmp_path: Path, corpus: Corpus, tokenizer: TextTokenizer) -> None:
    first = build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer))
    before = first.path.stat().st_mtime_ns
    assert build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer)) == first
    assert first.path.stat().st_mtime_ns == before
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".bin", ".ends", ".json"]


def test_other_text_or_another_tokenizer_has_another_entry(
    tmp_path: Path, corpus: Corpus, tokenizer: TextTokenizer
) -> None:
    build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer))
    other = load_tokenizer(train_tokenizer([tmp_path / "text"], 280, tmp_path / "other"))
    assert cached_tokens(tmp_path / "cache", corpus, TextEncoder(other)) is None
    write_text(tmp_path / "more", documents=3)
    more = read_corpus([str(tmp_path / "more")])
    assert cached_tokens(tmp_path / "cache", more, TextEncoder(tokenizer)) is None


@pytest.mark.parametrize("damage", ["short", "gone", "not json"])
def test_a_damaged_entry_is_built_again(
    tmp_path: Path, corpus: Corpus, tokenizer: TextTokenizer, damage: str
) -> None:
    tokens = build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer))
    ids = tokens.open().tolist()
    if damage == "short":
        tokens.path.write_bytes(tokens.path.read_bytes()[:-2])
    elif damage == "gone":
        tokens.path.unlink()
    else:
        tokens.path.with_suffix(".json").write_text("{")
    assert cached_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer)) is None
    assert build_tokens(tmp_path / "cache", corpus, TextEncoder(tokenizer)).open().tolist() == ids


def test_an_error_in_the_text_leaves_no_partial_file(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    path = tmp_path / "bad" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(Exception, match="line 2"):
        build_tokens(tmp_path / "cache", read_corpus([str(path)]), TextEncoder(tokenizer))
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_no_text_has_no_tokens(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "empty.txt").write_text("")
    tokens: Tokens = build_tokens(
        tmp_path / "cache", read_corpus([str(tmp_path / "empty.txt")]), TextEncoder(tokenizer)
    )
    assert tokens.num_tokens == 0 and tokens.open().tolist() == []
