"""Data files found and checked: text, JSON lines, Parquet, and folders of the `datasets` library.

Files that a directory or a glob brought in and that are none of these are left out and counted; a
file named by itself has to be one.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path

from triptych.errors import DataError, Problem, nearest

_READ_BYTES = 1 << 20
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of `Dataset` and `DatasetDict.save_to_disk`


class Kind(StrEnum):
    """What a file is."""

    TEXT = "text"  # one document
    JSONL = "jsonl"  # a JSON object a line
    PARQUET = "parquet"  # a table
    DATASET = "dataset"  # a folder that `Dataset.save_to_disk` wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file (or a saved data set) with the digest of its content."""

    path: Path
    kind: Kind
    size_bytes: int
    digest: str


def find_files(patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[Path]:
    """The files of patterns, sorted, each once; a saved data set is one file.

    Raises DataError for patterns without any, and for a data set whose split is not named.
    """
    found: set[str] = set()
    problems = []
    for pattern in patterns:
        paths = _matches(pattern)
        if not paths:
            problems.append(_nothing(pattern))
        found.update(_whole(path) for path in paths)
    problems += [_unnamed_split(Path(path)) for path in found if path.endswith(_SPLITS)]
    if problems:
        raise DataError(problems)
    rules = [*exclude, *(f"*/{rule}" for rule in exclude)]
    return [Path(p) for p in sorted(found) if not any(fnmatch(p, rule) for rule in rules)]


def check_file(path: Path) -> DataFile | None:
    """The file with its digest, read once; None if it is not of a kind that we read."""
    kind = kind_of(path)
    if kind is Kind.DATASET:
        return _digested(path, kind, sorted(p for p in path.iterdir() if p.is_file()))
    try:
        if kind is Kind.PARQUET:
            with path.open("rb") as stream:
                is_parquet = stream.read(4) == b"PAR1"
            return _digested(path, kind, [path]) if is_parquet else None
        return _digested(path, kind, [path], is_text=True)
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def kind_of(path: Path) -> Kind:
    """What a file is by its name."""
    if path.is_dir():
        return Kind.DATASET
    return {".parquet": Kind.PARQUET, ".jsonl": Kind.JSONL}.get(path.suffix, Kind.TEXT)


def _matches(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        if os.path.isfile(os.path.join(pattern, _STATE)):
            return [pattern]
        pattern = os.path.join(glob.escape(pattern), "**")
    elif os.path.isfile(pattern):
        return [pattern]
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _whole(path: str) -> str:
    """The saved data set that a file belongs to, or the file itself."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        return os.path.normpath(path)
    has_state = os.path.isfile(os.path.join(folder, _STATE))
    return folder if has_state and _has_arrow(folder) else path


def _has_arrow(folder: str) -> bool:
    return any(name.endswith(".arrow") for name in os.listdir(folder))


def _unnamed_split(path: Path) -> Problem:
    splits = sorted(str(p.parent) for p in path.parent.glob(f"*/{_STATE}"))
    rule = "of a data set with several splits the job names those to read"
    return Problem(f"{path.parent} holds {len(splits)} splits", rule, " or ".join(splits))


def _nothing(pattern: str) -> Problem:
    folder, name = os.path.split(pattern)
    if any(c in pattern for c in "*?[") or os.path.isdir(pattern):
        return Problem(f"no file matches {pattern}", "data is read from files that exist")
    close = nearest(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    works = ", ".join(os.path.join(folder, other) for other in close)
    return Problem(f"no file or directory {pattern}", "data is read from files that exist", works)


def _digested(
    path: Path, kind: Kind, parts: Sequence[Path], *, is_text: bool = False
) -> DataFile | None:
    """The file with its digest; None for text that holds a zero byte.

    Raises UnicodeDecodeError for text that is not UTF-8, OSError if it cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size_bytes = 0
    for part in parts:
        with part.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                if is_text and "\0" in decoder.decode(block):
                    return None
                hasher.update(block)
                size_bytes += len(block)
    decoder.decode(b"", final=True)
    return DataFile(path=path, kind=kind, size_bytes=size_bytes, digest=hasher.hexdigest())
