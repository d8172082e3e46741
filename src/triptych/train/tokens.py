"""The token cache: a corpus as one long row of token ids on disk, built once.

`KEY.bin` holds the ids (uint16 or uint32), `KEY.json` what they are; the JSON file is written
last and is the mark that the other one is whole. KEY is a digest of the text and the tokenizer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from triptych.train.corpus import Corpus, Piece, documents
from triptych.train.tokenizer import TextTokenizer

SCHEMA_VERSION = 1
_BATCH_CHARACTERS = 1 << 21

Ids = npt.NDArray[np.integer[Any]]
Progress = Callable[[int, int], None]  # (bytes of text done, bytes in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A row of token ids on disk, each document followed by the end-of-document id."""

    path: Path
    dtype: str
    num_tokens: int
    num_documents: int
    end_id: int
    digest: str

    def open(self) -> Ids:
        """The ids, mapped from disk (read only). Shape [num_tokens]."""
        if self.num_tokens == 0:
            return np.zeros(0, dtype=self.dtype)
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))


def cached_tokens(folder: Path, corpus: Corpus, tokenizer: TextTokenizer) -> Tokens | None:
    """The tokens of a corpus if the cache holds them whole."""
    path = folder / f"{_key(corpus, tokenizer)}.json"
    if not path.is_file():
        return None
    try:
        tokens = replace(
            from_json(json.loads(path.read_text("utf-8"))), path=path.with_suffix(".bin")
        )
    except (ValueError, KeyError):
        return None
    expected_bytes = tokens.num_tokens * np.dtype(tokens.dtype).itemsize
    is_whole = tokens.path.is_file() and tokens.path.stat().st_size == expected_bytes
    return tokens if is_whole else None


def build_tokens(
    folder: Path,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    *,
    least_tokens: int = 0,
    progress: Progress | None = None,
) -> Tokens:
    """The tokens of a corpus, from the cache or newly made.

    Nothing is written for a corpus of fewer than `least_tokens`: the caller will refuse it.
    """
    cached = cached_tokens(folder, corpus, tokenizer)
    if cached is not None:
        return cached
    key = _key(corpus, tokenizer)
    writer = _Writer(folder, key, _dtype(tokenizer), least_tokens)
    num_documents = 0
    try:
        for ids, ended in _encoded(corpus, tokenizer, progress):
            writer.add(ids)
            num_documents += ended
        writer.finish()
    finally:
        writer.drop_partial()
    tokens = Tokens(
        path=folder / f"{key}.bin",
        dtype=_dtype(tokenizer),
        num_tokens=writer.num_tokens,
        num_documents=num_documents,
        end_id=tokenizer.end_id,
        digest=key,
    )
    if writer.is_on_disk:
        _write_whole(folder / f"{key}.json", json.dumps(to_json(tokens)).encode())
    return tokens


class _Writer:
    """Collects ids in memory until there are enough, then in a file that gets its name last."""

    def __init__(self, folder: Path, key: str, dtype: str, least_tokens: int) -> None:
        self._folder = folder
        self._key = key
        self._dtype = dtype
        self._least_tokens = least_tokens
        self._waiting: list[Ids] = []
        self._stream: BinaryIO | None = None
        self._partial: Path | None = None
        self.num_tokens = 0

    @property
    def is_on_disk(self) -> bool:
        return self._stream is not None

    def add(self, ids: Sequence[int]) -> None:
        self._waiting.append(np.asarray(ids, dtype=self._dtype))
        self.num_tokens += len(ids)
        if self.num_tokens >= self._least_tokens:
            self._flush()

    def finish(self) -> None:
        """Gives the file its name if there were enough tokens."""
        if self._stream is None or self._partial is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._partial, self._folder / f"{self._key}.bin")

    def drop_partial(self) -> None:
        """Removes what an error left behind."""
        if self._stream is not None and self._partial is not None:
            self._stream.close()
            self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._stream is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=f"{self._key}.", suffix=".tmp")
            self._stream, self._partial = os.fdopen(handle, "wb"), Path(name)
        for ids in self._waiting:
            self._stream.write(ids.tobytes())
        self._waiting.clear()


def _encoded(
    corpus: Corpus, tokenizer: TextTokenizer, progress: Progress | None
) -> Iterator[tuple[list[int], bool]]:
    """The ids of each piece, and whether a document ended with it; whole batches at a time."""
    done_bytes = 0
    for batch in _batches(documents(corpus)):
        encoded = tokenizer.encode([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            yield ([*ids, tokenizer.end_id] if piece.ends_document else ids), piece.ends_document
        done_bytes += sum(len(piece.text) for piece in batch)
        if progress is not None:
            progress(done_bytes, corpus.size_bytes)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _key(corpus: Corpus, tokenizer: TextTokenizer) -> str:
    return f"{corpus.digest[:16]}-{tokenizer.digest[:16]}-{SCHEMA_VERSION}"


def _dtype(tokenizer: TextTokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def to_json(tokens: Tokens) -> dict[str, object]:
    """The values as JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(tokens.path),
        "dtype": tokens.dtype,
        "num_tokens": tokens.num_tokens,
        "num_documents": tokens.num_documents,
        "end_id": tokens.end_id,
        "digest": tokens.digest,
    }


def from_json(values: Mapping[str, Any]) -> Tokens:
    """What `to_json` gave."""
    return Tokens(
        path=Path(values["path"]),
        dtype=str(values["dtype"]),
        num_tokens=int(values["num_tokens"]),
        num_documents=int(values["num_documents"]),
        end_id=int(values["end_id"]),
        digest=str(values["digest"]),
    )


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".part")
    partial.write_bytes(content)
    os.replace(partial, path)
