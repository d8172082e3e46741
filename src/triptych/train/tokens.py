"""The token cache: a corpus as one long row of token ids on disk, built once.

`KEY.bin` holds the ids (uint16 or uint32), `KEY.ends` where each document ends (int64), `KEY.mask`
which tokens are targets (a byte each; only where some are not), `KEY.json` what they are. The JSON
file is written last and is the mark that the others are whole. KEY is a digest of the data and of
what decides the ids.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from triptych.train.corpus import Corpus
from triptych.train.encode import Encoded, Encoder
from triptych.train.folder import write_text

SCHEMA_VERSION = 2
IDS, ENDS, MASK, HEAD = ".bin", ".ends", ".mask", ".json"

Ids = npt.NDArray[np.integer[Any]]
Progress = Callable[[int, int], None]  # (bytes of text done, bytes in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A row of token ids on disk, document after document."""

    path: Path
    dtype: str
    num_tokens: int
    num_documents: int
    end_id: int
    digest: str
    has_mask: bool = False

    def open(self) -> Ids:
        """The ids, mapped from disk (read only). Shape [num_tokens]."""
        return self._open(IDS, self.dtype, self.num_tokens)

    def open_ends(self) -> Ids:
        """The place behind the last token of each document. Shape [num_documents]."""
        return self._open(ENDS, "int64", self.num_documents)

    def open_mask(self) -> Ids | None:
        """1 for each token that is a target, 0 for others; None if all are."""
        return self._open(MASK, "uint8", self.num_tokens) if self.has_mask else None

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """How long each of its files is, by suffix."""
        sizes = {IDS: self.num_tokens * np.dtype(self.dtype).itemsize, ENDS: 8 * self.num_documents}
        return sizes | ({MASK: self.num_tokens} if self.has_mask else {})

    def _open(self, suffix: str, dtype: str, count: int) -> Ids:
        if count == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(self.path.with_suffix(suffix), dtype=dtype, mode="r", shape=(count,))


def cached_tokens(folder: Path, corpus: Corpus, encoder: Encoder) -> Tokens | None:
    """The tokens of a corpus if the cache holds them whole."""
    path = folder / f"{_key(corpus, encoder)}{HEAD}"
    try:
        tokens = from_json(json.loads(path.read_text("utf-8")))
        tokens = replace(tokens, path=path.with_suffix(IDS))
        sizes = {s: path.with_suffix(s).stat().st_size for s in tokens.sizes_bytes}
    except (OSError, ValueError, KeyError):
        return None
    return tokens if sizes == tokens.sizes_bytes else None


def build_tokens(
    folder: Path, corpus: Corpus, encoder: Encoder, progress: Progress | None = None
) -> Tokens:
    """The tokens of a corpus, from the cache or newly made."""
    cached = cached_tokens(folder, corpus, encoder)
    if cached is not None:
        return cached
    key, dtype = _key(corpus, encoder), _dtype(encoder)
    folder.mkdir(parents=True, exist_ok=True)
    with _Writer(folder / key, dtype, encoder.masks) as writer:
        done = 0
        for piece in encoder.encoded(corpus):
            writer.add(piece)
            done += piece.size
            if progress is not None:
                progress(done, corpus.size_bytes)
        writer.finish()
    tokens = Tokens(
        path=folder / f"{key}{IDS}",
        dtype=dtype,
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        end_id=encoder.tokenizer.end_id,
        digest=key,
        has_mask=encoder.masks,
    )
    write_text(folder / f"{key}{HEAD}", json.dumps(to_json(tokens)))
    return tokens


def remove_tokens(tokens: Tokens) -> None:
    """Takes an entry out of the cache, and the cache itself if nothing else is in it."""
    for path in tokens.path.parent.glob(f"{tokens.path.stem}*"):
        path.unlink(missing_ok=True)
    if tokens.path.parent.is_dir() and not any(tokens.path.parent.iterdir()):
        tokens.path.parent.rmdir()


class _Writer:
    """Writes the files of an entry under other names, and names them at the end."""

    def __init__(self, base: Path, dtype: str, masks: bool) -> None:
        self._base, self._dtype = base, dtype
        self._mark = uuid.uuid4().hex[:8]
        suffixes = (IDS, ENDS, *([MASK] if masks else []))
        self._streams: dict[str, BinaryIO] = {s: self._partial(s).open("wb") for s in suffixes}
        self.num_tokens = self.num_documents = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes what an error left behind."""
        for suffix, stream in self._streams.items():
            stream.close()
            self._partial(suffix).unlink(missing_ok=True)

    def add(self, piece: Encoded) -> None:
        """Appends some tokens."""
        self.num_tokens += len(piece.ids)
        self._write(IDS, np.asarray(piece.ids, dtype=self._dtype))
        if piece.trained is not None:
            self._write(MASK, np.asarray(piece.trained, dtype="uint8"))
        if piece.ends_document:
            self.num_documents += 1
            self._write(ENDS, np.asarray([self.num_tokens], dtype="int64"))

    def finish(self) -> None:
        """Gives the files their names."""
        for suffix, stream in self._streams.items():
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(self._partial(suffix), self._base.with_name(self._base.name + suffix))

    def _write(self, suffix: str, values: Ids) -> None:
        self._streams[suffix].write(values.tobytes())

    def _partial(self, suffix: str) -> Path:
        return self._base.with_name(f"{self._base.name}.{self._mark}{suffix}.part")


def _key(corpus: Corpus, encoder: Encoder) -> str:
    return f"{corpus.digest[:16]}-{encoder.digest[:16]}-{SCHEMA_VERSION}"


def _dtype(encoder: Encoder) -> str:
    return "uint16" if encoder.tokenizer.vocab_size <= 1 << 16 else "uint32"


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
        "has_mask": tokens.has_mask,
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
        has_mask=bool(values["has_mask"]),
    )
