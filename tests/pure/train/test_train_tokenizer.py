"""A tokenizer trained on text: size, bytes, end of text, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_samples import write_text

from triptych.errors import DataError
from triptych.tokenizer.load import END_OF_TEXT, load_tokenizer
from triptych.train.tokenizer_training import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path / "text")
    return train_tokenizer([tmp_path / "text"], 290, tmp_path / "tokenizer")


def test_it_has_the_size_that_was_asked_for_and_the_end_of_text_first(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 290
    assert tokenizer.end_id == 0


@pytest.mark.parametrize("text", ["alpha beta\n", "  def f(x):\n\treturn 'ü€🙂'", "\x00\x7f", ""])
def test_every_text_comes_back_from_its_ids(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode([text])[0]
    assert tokenizer.tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids


def test_training_is_repeatable(folder: Path, tmp_path: Path) -> None:
    again = train_tokenizer([tmp_path / "text"], 290, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_more_tokens_than_the_text_has_are_refused_with_the_number_that_works(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "text", documents=1)
    with pytest.raises(DataError, match="vocabulary of") as caught:
        train_tokenizer([tmp_path / "text"], 5000, tmp_path / "out")
    works = int(str(caught.value).rsplit("vocabulary of ", 1)[1])
    train_tokenizer([tmp_path / "text"], works, tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").vocab_size == works


def test_fewer_tokens_than_bytes_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "text", documents=1)
    with pytest.raises(DataError, match="257 or more"):
        train_tokenizer([tmp_path / "text"], 256, tmp_path / "out")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("named", [END_OF_TEXT, {"content": END_OF_TEXT, "special": True}])
def test_the_end_of_text_is_what_the_config_names(folder: Path, named: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert load_tokenizer(folder).end_id == 0


def test_a_tokenizer_without_an_end_of_text_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(DataError, match="eos_token"):
        load_tokenizer(folder)


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(values))
    assert len(load_tokenizer(folder).encode(["alpha beta gamma delta epsilon"])[0]) > 3
