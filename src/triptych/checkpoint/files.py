"""Files that are on the disk when we say so: synced, counted, checksummed."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

from triptych.checkpoint.index import FileInfo

_CHUNK_BYTES = 16 * 1024 * 1024


class SyncedFile:
    """A file, written anew and on the disk when its `with` block ends well; counts bytes, crc32."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._bytes = 0
        self._crc = 0

    def write(self, data: Any) -> None:
        """Appends a buffer of bytes (chunk by chunk, so that checksum and copy share the cache)."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._crc = zlib.crc32(chunk, self._crc)
            self._file.write(chunk)
        self._bytes += len(view)

    @property
    def info(self) -> FileInfo:
        """Size and checksum of what has been written so far."""
        return FileInfo(self._bytes, f"{self._crc:08x}")

    def __enter__(self) -> SyncedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_bytes(path: Path, data: bytes) -> FileInfo:
    """Writes a file anew, synced."""
    with SyncedFile(path) as file:
        file.write(data)
    return file.info


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The crc32 of a file: eight hexadecimal digits."""
    crc = 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return f"{crc:08x}"


def file_fault(path: Path, info: FileInfo, contents: bool) -> str | None:
    """What is wrong with a file that should look like `info`, or None; named, for people.

    `contents` also compares the checksum, which reads the whole file.
    """
    try:
        size = path.stat().st_size
        if size != info.bytes:
            return f"{path.name} has {size} bytes instead of {info.bytes}"
        if contents and info.crc32 is not None and checksum(path) != info.crc32:
            return f"{path.name} is damaged (its checksum differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None
