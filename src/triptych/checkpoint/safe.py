"""safetensors files: written as a stream, read slice by slice.

Reading is the library's. Writing is ours because its writer wants every tensor in memory as a
copy of its own; a rank's shards are views of flat buffers, and an export is larger than memory.
The format: 8 bytes little-endian header length, JSON header, data (safetensors README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a view of one element keeps any stride
    return flat.view(torch.uint8).numpy()


def run_of(shape: Sequence[int], at: Sequence[slice]) -> tuple[int, int] | None:
    """First element and number of elements of a box that lies in one piece in a stored tensor.

    None for a box of several pieces: one that is cut behind a dimension of which it has more
    than one index.
    """
    ranges = [range(*cut.indices(size)) for cut, size in zip(at, shape, strict=True)]
    cut_at = [i for i, (own, size) in enumerate(zip(ranges, shape, strict=True)) if len(own) < size]
    if any(len(own) > 1 for own in ranges[: max(cut_at, default=0)]):
        return None
    first = 0
    for own, size in zip(ranges, shape, strict=True):
        first = first * size + own.start
    return first, prod(len(own) for own in ranges)


class _Data:
    """Where the tensors of an open safetensors file lie, and the file itself."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("rb", buffering=0)
        length = int.from_bytes(self.file.read(8), "little")
        self._begin = 8 + length
        self._header = json.loads(self.file.read(length))

    def read_into(self, key: str, at: Sequence[slice], into: torch.Tensor) -> bool:
        """Reads a box straight into a tensor if both are one piece of the same dtype."""
        head = self._header[key]
        run = run_of(head["shape"], at)
        same = head["dtype"] == _FILE_WORDS.get(_WORDS.get(into.dtype, ""))
        if run is None or not same or not into.is_contiguous() or into.device.type != "cpu":
            return False
        if run[1]:
            self._fill(self._begin + head["data_offsets"][0] + run[0] * into.itemsize, into)
        return True

    def _fill(self, begin: int, into: torch.Tensor) -> None:
        view = memoryview(_raw(into))
        self.file.seek(begin)
        done = 0
        while done < len(view):
            count = self.file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file ends within a tensor")
            done += count


class Reader:
    """The safetensors files of a folder, opened when needed and kept open for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._data: dict[str, _Data] = {}
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

    def read_into(self, file: str, key: str, at: tuple[slice, ...], into: torch.Tensor) -> None:
        """Copies a part of a stored tensor; without a copy between where that can be."""
        self._handle(file)  # whose checks of the header hold for what follows
        try:
            if not self._data[file].read_into(key, at, into):
                into.copy_(self.read(file, key, at))
        except OSError as error:
            raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error

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
                self._data[file] = _Data(self._folder / file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self._folder / file} cannot be read: {error}") from error
            self._stack.enter_context(self._data[file].file)
            self._open[file] = self._stack.enter_context(opened)
        return self._open[file]

    def _close(self) -> None:
        self._stack.close()
        self._open.clear()
        self._data.clear()
