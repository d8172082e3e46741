"""A data set read as documents or as dialogues.

A text file is one document. A `.jsonl` file has one document or dialogue in each line, a Parquet
file or a saved data set in each row, under a key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import DataError, Problem, nearest
from triptych.train.files import DataFile, Kind, check_file, find_files

_PIECE_CHARACTERS = 1 << 20
_TABLES = {Kind.PARQUET: "triptych.train.parquet", Kind.DATASET: "triptych.train.saved_dataset"}

Message = Mapping[str, Any]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files of a data set, in a fixed order, and how many were left out as not data.

    `messages_key` is that of dialogues; None for documents, which are under `text_key`.
    """

    files: tuple[DataFile, ...]
    text_key: str = "text"
    messages_key: str | None = None
    num_skipped: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """A digest of all documents: of the files' contents in order, not of their names."""
        keys = f"{self.text_key} {self.messages_key}"
        parts = [keys, *(f"{file.digest} {file.kind}" for file in self.files)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class Piece(NamedTuple):
    """Part of a document: long ones come in several pieces, cut at line ends."""

    text: str
    ends_document: bool


def read_corpus(
    patterns: Sequence[str],
    *,
    exclude: Sequence[str] = (),
    text_key: str = "text",
    messages_key: str | None = None,
) -> Corpus:
    """The corpus of files, directories and globs. Raises DataError with all that match nothing."""
    named = {Path(os.path.normpath(pattern)) for pattern in patterns if os.path.isfile(pattern)}
    files, skipped, problems = [], 0, []
    for path in find_files(patterns, exclude):
        file = check_file(path)
        if file is not None and not (messages_key and file.kind is Kind.TEXT):
            files.append(file)
        elif Path(os.path.normpath(path)) in named:
            problems.append(_not_data(path, messages_key is not None))
        else:
            skipped += 1
    if problems:
        raise DataError(problems)
    return Corpus(
        files=tuple(files), text_key=text_key, messages_key=messages_key, num_skipped=skipped
    )


def _not_data(path: Path, wants_dialogues: bool) -> Problem:
    rows = "JSON lines (.jsonl), Parquet, or a folder of the `datasets` library"
    if wants_dialogues:
        return Problem(f"{path} holds no rows of dialogues", f"dialogues are {rows}")
    return Problem(f"{path} is not UTF-8 text", f"training data is text, {rows}")


def documents(corpus: Corpus) -> Iterator[Piece]:
    """The text of all documents. Raises DataError for a row without text."""
    for file in corpus.files:
        if file.kind is Kind.TEXT:
            yield from _whole(file)
            continue
        for where, row in rows(file):
            yield Piece(_text_of(row, corpus.text_key, where), True)


def dialogues(corpus: Corpus) -> Iterator[tuple[str, list[Message]]]:
    """All dialogues, each with where it stands. Raises DataError for a row without messages."""
    key = corpus.messages_key or "messages"
    for file in corpus.files:
        for where, row in rows(file):
            yield where, _messages_of(row, key, where)


def rows(file: DataFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a file of rows, each with where it stands."""
    if file.kind is Kind.JSONL:
        yield from _lines(file.path)
        return
    table: Iterable[Mapping[str, Any]] = import_module(_TABLES[file.kind]).rows(file.path)
    for number, row in enumerate(table, start=1):
        yield f"{file.path}, row {number}", row


def _whole(file: DataFile) -> Iterator[Piece]:
    """A text file in pieces that end with a line, so that a huge file needs little memory."""
    text = ""
    with file.path.open(encoding="utf-8", newline="") as stream:
        while block := stream.read(_PIECE_CHARACTERS):
            head, newline, tail = (text + block).rpartition("\n")
            if len(block) == _PIECE_CHARACTERS and newline:
                yield Piece(head + newline, False)
                text = tail
            else:
                text += block
    if text or file.size_bytes:
        yield Piece(text, True)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(Problem(where, "each line of a .jsonl is a JSON object"))
            yield where, row


def _text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    text = row.get(key)
    if not isinstance(text, str):
        close = nearest(key, row) or [k for k, v in row.items() if type(v) is str]
        works = f'[data] text_key = "{close[0]}"' if close else ""
        rule = f"[data] text_key = '{key}' names a text in each row"
        raise DataError(Problem(f"{where}: no text under '{key}'", rule, works))
    return text


def _messages_of(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    messages = row.get(key)
    if _is_dialogue(messages):
        assert isinstance(messages, list)
        return messages
    found = next((k for k, v in row.items() if _is_dialogue(v)), None)
    rule = f"[data] messages_key = '{key}' names a list of messages with role and content"
    works = f'[data] messages_key = "{found}"' if found else ""
    raise DataError(Problem(f"{where}: no messages under '{key}'", rule, works))


def _is_dialogue(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each
        for each in value
    )
