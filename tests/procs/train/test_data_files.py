"""The same documents from every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chat_samples import dialogue
from datasets import Dataset, DatasetDict

from triptych.errors import DataError
from triptych.train.corpus import dialogues, documents, read_corpus

TEXTS = ["alpha\nbeta", "gamma", "ü"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The texts in every kind of file, each in a folder of its own."""
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    for name in ("text", "jsonl", "parquet"):
        (tmp_path / name).mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    (tmp_path / "jsonl" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "parquet" / "a.parquet", row_group_size=2
    )
    Dataset.from_list(rows[::-1]).select([2, 1, 0]).save_to_disk(tmp_path / "saved")
    return tmp_path


def texts(*patterns: Path | str, **options: str) -> list[str]:
    corpus = read_corpus([str(p) for p in patterns], **options)  # type: ignore[arg-type]
    return [piece.text for piece in documents(corpus)]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "saved", "saved/*.arrow"])
def test_documents_are_the_same_from_every_kind_of_file(folder: Path, kind: str) -> None:
    assert texts(folder / kind) == TEXTS


def test_a_folder_of_folders_has_all_of_them(folder: Path) -> None:
    assert sorted(texts(folder)) == sorted(TEXTS * 4)


def test_dialogues_are_read_from_rows(tmp_path: Path) -> None:
    talks = [dialogue("a", "b"), dialogue("c", "d", "e", "f")]
    table = pyarrow.Table.from_pylist([{"talk": talk} for talk in talks])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    corpus = read_corpus([str(tmp_path / "a.parquet")], messages_key="talk")
    assert [messages for _, messages in dialogues(corpus)] == talks
    with pytest.raises(DataError, match=r'row 1.*\n.*\n.*messages_key = "talk"'):
        list(dialogues(read_corpus([str(tmp_path)], messages_key="messages")))


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    part = Dataset.from_dict({"text": TEXTS})
    DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "all")
    with pytest.raises(DataError, match="2 splits") as caught:
        read_corpus([str(tmp_path / "all")])
    assert str(tmp_path / "all" / "test") in str(caught.value)
    assert texts(tmp_path / "all" / "train") == TEXTS


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        texts(tmp_path / "a.parquet")


def test_plain_text_holds_no_dialogues(folder: Path) -> None:
    with pytest.raises(DataError, match="no rows of dialogues"):
        read_corpus([str(folder / "text" / "0.txt")], messages_key="messages")
