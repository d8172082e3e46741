"""The folder of a checkpoint: its name, its mark, what is wrong with it.

A checkpoint appears under its final name complete or not at all:

    checkpoints/step-00000010.tmp-3f2a   while it is written; never read, removed by the next save
    checkpoints/step-00000010            renamed when every file and the mark are on the disk
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from triptych.checkpoint.files import file_fault
from triptych.checkpoint.index import SCHEMA_VERSION, FileInfo, Index, parse_index, parse_json
from triptych.errors import CheckpointError

INDEX = "index.json"
STATE = "state.json"
MARK = "complete.json"

_STATE_FILE = ".optimizer.safetensors"

_FINAL = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")


def step_name(step: int) -> str:
    """`step-00000010`."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def rank_file(rank: int, kind: str = "weight") -> str:
    """`rank-00003.safetensors` for weights, `rank-00003.optimizer.safetensors` for all else."""
    return f"rank-{rank:05d}.safetensors" if kind == "weight" else f"rank-{rank:05d}{_STATE_FILE}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a folder by name, newest first, damaged ones too."""
    found = [
        (int(match.group(1)), path)
        for path in folder.iterdir()
        if (match := _FINAL.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """Folders of saves (or removals) that were interrupted."""
    return sorted(p for p in folder.iterdir() if _TEMPORARY.fullmatch(p.name) and p.is_dir())


def mark_text(step: int, index: FileInfo) -> str:
    """The content of `complete.json`, the mark that is written last."""
    document = {"schema_version": SCHEMA_VERSION, "step": step, "index": index._asdict()}
    return json.dumps(document, indent=1)


def read_index(checkpoint: Path, kinds: Collection[str] | None = None) -> Index:
    """The index of a checkpoint, of some kinds of tensors or all.

    Raises CheckpointError unless mark and index are intact.
    """
    mark = read_json(checkpoint / MARK)
    try:
        info = FileInfo(int(mark["index"]["bytes"]), str(mark["index"]["xxh3"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / MARK} is damaged: {error!r}") from error
    fault = file_fault(checkpoint / INDEX, info, contents=True)
    if fault is not None:
        raise CheckpointError(f"{checkpoint}: {fault}")
    index = parse_index(_read_text(checkpoint / INDEX), str(checkpoint / INDEX))
    return index if kinds is None else index.only(kinds)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint; raises CheckpointError that names it if it is missing or bad."""
    return parse_json(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def fault(checkpoint: Path, kinds: Collection[str] | None = None) -> str | None:
    """Why a checkpoint is not complete (naming the file), or None; as far as it holds `kinds`.

    Checks the mark, the index, presence and size of every file, and the contents of all but the
    tensor files (`damaged_files` reads those).
    """
    try:
        index = read_index(checkpoint, kinds)
    except CheckpointError as error:
        return error.problems[0].what
    for name, info in index.files.items():
        contents = not name.endswith(".safetensors")
        found = file_fault(checkpoint / name, info, contents)
        if found is not None:
            return f"{checkpoint}: {found}"
    return None


def damaged_files(checkpoint: Path, index: Index, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint by checksum: with every `parts`-th of them."""
    mine = sorted(index.files)[part::parts]
    faults = (file_fault(checkpoint / name, index.files[name], contents=True) for name in mine)
    return [f"{checkpoint}: {found}" for found in faults if found is not None]
