"""safetensors files: written as a stream, read slice by slice.

Reading is the library's. Writing is ours because its writer wants every tensor in memory as a
copy of its own; a rank's shards are views of flat buffers, and an export is larger than memory.
The format: 8 bytes little-endian header length, JSON header, data (safetensors README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from triptych.checkpoint.files import SyncedFile
from triptych.checkpoint.index import FileInfo, Logical
from triptych.errors import CheckpointError
from triptych.runtime.precision import torch_dtype

_FILE_WORDS = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TORCH_DTYPES: dict[str, torch.dtype] = {word: torch_dtype(word) for word in _FILE_WORDS}
_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}
_FROM_FILE = {file_word: word for word, file_word in _FILE_WORDS.items()}
_MAX_OPEN_FILES = 128


def dtype_word(dtype: torch.dtype) -> str:
    """fp32 for torch.float32, and so on; only floating-point types are stored."""
    word = _WORDS.get(dtype)
    if word is None:
        raise CheckpointError(f"a tensor of {dtype} cannot be stored; stored are {[*TORCH_DTYPES]}")
    return word


class Entry(NamedTuple):
    """One tensor of a file to be written; `read` is called when its turn comes."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


def write_safetensors(
    path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]
) -> FileInfo:
    """Writes a safetensors file anew, synced; one tensor is in memory (twice) at a time."""
    ordered = sorted(entries, key=lambda e: -TORCH_DTYPES[e.dtype].itemsize)  # all data aligned
    with SyncedFile(path) as file:
        file.write(_header(ordered, metadata))
        for entry in ordered:
            tensor = entry.read()
            assert tensor.shape == entry.shape and dtype_word(tensor.dtype) == entry.dtype
            if tensor.numel():
                file.write(_raw(tensor))
    return file.info


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        end = offset + torch.Size(entry.shape).numel() * TORCH_DTYPES[entry.dtype].itemsize
        header[entry.key] = {
            "dtype": _FILE_WORDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor as a buffer, without a copy where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Reader:
    """The safetensors files of a folder, opened when needed and kept open for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, file: str, key: str, at: tuple[slice, ...]) -> torch.Tensor:
        """A part of a stored tensor; only that part is read."""
        handle = self._handle(file)
        try:
            found: torch.Tensor = handle.get_slice(key)[at]
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: {error}") from error
        return found

    def tensors(self, file: str) -> Iterator[tuple[str, Logical]]:
        """Keys, shapes and dtypes in a file. A dtype we do not store keeps the file's word."""
        handle = self._handle(file)
        for key in handle.keys():  # noqa: SIM118 (not a mapping)
            head = handle.get_slice(key)
            word = str(head.get_dtype())
            yield key, Logical(tuple(head.get_shape()), _FROM_FILE.get(word, word))

    def metadata(self, file: str) -> dict[str, str]:
        """The free-form metadata of a file."""
        return dict(self._handle(file).metadata() or {})

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                self._close()
            try:
                opened = safe_open(self._folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error
            self._open[file] = self._stack.enter_context(opened)
        return self._open[file]

    def _close(self) -> None:
        self._stack.close()
        self._open.clear()
