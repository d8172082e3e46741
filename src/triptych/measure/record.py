"""What a calibration has measured so far, line by line beside the file that it will write.

A calibration that was cut off goes on from here, if it is of the same machine, software and ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import RunError
from triptych.measure.watch import Row

VERSION = 1
"""Counts up when a figure means something else than before."""


def record_path(out: Path) -> Path:
    """Where the record of a file is kept."""
    return out.with_name(f".{out.name}.part")


class Entry(NamedTuple):
    """One figure: its rows, the typical relative spread of repeated measurements, and when."""

    rows: list[Row]
    noise: float
    date: str


class Record:
    """The figures measured so far."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = {"version": VERSION, **facts}
        self.entries: dict[str, Entry] = {}

    @classmethod
    def of(cls, out: Path, facts: Mapping[str, Any], again: bool) -> Record:
        """The record for a file, with what is there of an earlier attempt."""
        record = cls(record_path(out), facts)
        if not again:
            record.entries = record._read()
        if not record.entries:
            record._put(json.dumps(record.facts) + "\n", mode="w")
        return record

    def add(self, name: str, entry: Entry) -> None:
        """Keeps a figure at once. Raises RunError if it cannot be written."""
        self._put(json.dumps({"figure": name, **entry._asdict()}) + "\n", mode="a")
        self.entries[name] = entry

    def finish(self, out: Path, text: str) -> None:
        """Writes the file whole, and forgets the record. Raises RunError if it cannot be written;
        the record stays then.
        """
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, out)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unwritten(out, error) from error
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Entry]:
        """The figures of an earlier attempt; a last line that was cut off counts for nothing."""
        try:
            first, *lines = self.path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) != json.loads(json.dumps(self.facts)):
                return {}
        except (OSError, ValueError):
            return {}
        found = {}
        for line in lines:
            try:
                values = json.loads(line)
                entry = Entry(values["rows"], values["noise"], values["date"])
            except (ValueError, KeyError):
                break
            found[values["figure"]] = entry
        self._put("".join([first + "\n", *(_line(n, e) for n, e in found.items())]), mode="w")
        return found

    def _put(self, text: str, mode: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(self.path, error) from error


def _line(name: str, entry: Entry) -> str:
    return json.dumps({"figure": name, **entry._asdict()}) + "\n"


def _unwritten(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror}")
