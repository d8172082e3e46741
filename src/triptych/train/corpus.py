"""Text files found, checked and read as documents.

A text file is one document; a `.jsonl` file has one in each line. Files that a directory or a
glob brought in and that are not UTF-8 text are left out and counted; a file named by itself has
to be text.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from triptych.errors import DataError, Problem, nearest

_READ_BYTES = 1 << 20
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file of text with the digest of its content."""

    path: Path
    size_bytes: int
    digest: str

    @property
    def is_jsonl(self) -> bool:
        """True if each line is a JSON object with a document."""
        return self.path.suffix == ".jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files of a data set, in a fixed order, and how many were left out as not text."""

    files: tuple[TextFile, ...]
    text_key: str = "text"
    num_skipped: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """A digest of all documents: of the files' contents in order, not of their names."""
        parts = [self.text_key, *(f"{file.digest} {file.is_jsonl}" for file in self.files)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class Piece(NamedTuple):
    """Part of a document: long ones come in several pieces, cut at line ends."""

    text: str
    ends_document: bool


def read_corpus(
    patterns: Sequence[str], *, exclude: Sequence[str] = (), text_key: str = "text"
) -> Corpus:
    """The corpus of files, directories and globs. Raises DataError with all that match nothing."""
    named = {Path(pattern) for pattern in patterns if os.path.isfile(pattern)}
    files, skipped, problems = [], 0, []
    for path in find_files(patterns, exclude):
        file = _checked(path)
        if file is not None:
            files.append(file)
        elif path in named:
            problems.append(Problem(f"{path} is not UTF-8 text", "training data is text"))
        else:
            skipped += 1
    if problems:
        raise DataError(problems)
    return Corpus(files=tuple(files), text_key=text_key, num_skipped=skipped)


def find_files(patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[Path]:
    """The files of patterns, sorted, each once. Raises DataError for patterns without any."""
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        paths = _matches(pattern)
        if not paths:
            problems.append(_nothing(pattern))
        found.update(paths)
    if problems:
        raise DataError(problems)
    rules = [*exclude, *(f"*/{rule}" for rule in exclude)]
    return [Path(p) for p in sorted(found) if not any(fnmatch(p, rule) for rule in rules)]


def documents(corpus: Corpus) -> Iterator[Piece]:
    """The text of all documents. Raises DataError for a bad line of a `.jsonl`."""
    for file in corpus.files:
        if file.is_jsonl:
            yield from _lines(file, corpus.text_key)
        else:
            yield from _whole(file)


def _matches(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    elif os.path.isfile(pattern):
        return [pattern]
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _nothing(pattern: str) -> Problem:
    folder, name = os.path.split(pattern)
    if any(c in pattern for c in "*?[") or os.path.isdir(pattern):
        return Problem(f"no file matches {pattern}", "data is read from files that exist")
    close = nearest(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    works = ", ".join(os.path.join(folder, other) for other in close)
    return Problem(f"no file or directory {pattern}", "data is read from files that exist", works)


def _checked(path: Path) -> TextFile | None:
    """The file with its digest, read once; None if it is not UTF-8 text."""
    hasher = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size_bytes = 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                if "\0" in decoder.decode(block):
                    return None
                hasher.update(block)
                size_bytes += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return TextFile(path=path, size_bytes=size_bytes, digest=hasher.hexdigest())


def _whole(file: TextFile) -> Iterator[Piece]:
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


def _lines(file: TextFile, text_key: str) -> Iterator[Piece]:
    with file.path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Piece(_text_of(line, text_key, f"{file.path}, line {number}"), True)


def _text_of(line: str, text_key: str, where: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise DataError(Problem(where, "each line of a .jsonl is a JSON object"))
    text = document.get(text_key)
    if not isinstance(text, str):
        close = nearest(text_key, document) or [k for k, v in document.items() if type(v) is str]
        works = f'[data] text_key = "{close[0]}"' if close else ""
        rule = f"[data] text_key = '{text_key}' names a text in each line"
        raise DataError(Problem(f"{where}: no text under '{text_key}'", rule, works))
    return text
