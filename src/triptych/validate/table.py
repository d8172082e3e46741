"""A table of measured runs: rows with named cells, blank where the source does not say."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import InputError, Problem, nearest


class Skip(Exception):
    """A row that cannot be compared; the message is the reason, the same for all of its kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run. Cells that are absent or blank read as nothing."""

    cells: dict[str, str]

    @property
    def id(self) -> str:
        """The name of the row."""
        return self.text("id")

    @property
    def source(self) -> str:
        """The id up to its last dash: rows of one origin."""
        return self.id.rpartition("-")[0] or self.id

    def text(self, column: str) -> str:
        """A cell's text; empty if blank."""
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A cell's number; None if blank. Raises Skip if it is none."""
        text = self.text(column)
        if not text:
            return None
        try:
            return float(text)
        except ValueError as error:
            raise Skip(f"{column} is not a number") from error

    def count(self, column: str) -> int | None:
        """A cell's whole number; None if blank."""
        value = self.number(column)
        return None if value is None else int(value)

    def says(self, *words: str) -> bool:
        """True if the notes or the source mention one of some words, in lower case."""
        told = f"{self.text('notes')} {self.text('source')}".lower()
        return any(word in told for word in words)


def read_table(path: Path, required: Sequence[str], one_of: Sequence[str]) -> list[Row]:
    """The rows of a CSV file.

    Raises InputError with everything that is wrong with the file as a table: missing columns of
    `required`, and of `one_of` if it has none of them.
    """
    columns, rows = _read(path)
    problems = [_missing(path, name, columns) for name in required if name not in columns]
    if not any(name in columns for name in one_of):
        what = f"{path} has no column with a measurement"
        problems.append(Problem(what, "a run is measured", "one of " + ", ".join(one_of)))
    if not problems and not rows:
        problems.append(Problem(f"{path} has no rows", "a table has at least one run"))
    if problems:
        raise InputError(problems)
    return rows


def _read(path: Path) -> tuple[list[str], list[Row]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [Row({k: v for k, v in row.items() if isinstance(v, str)}) for row in reader]
            return list(reader.fieldnames or ()), rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            Problem(f"cannot read {path}: {error}", "a table of runs is a CSV file in UTF-8")
        ) from error


def _missing(path: Path, name: str, columns: Sequence[str]) -> Problem:
    close = nearest(name, columns)
    works = f"is it called {' or '.join(close)}?" if close else "a column of this name"
    return Problem(f"{path} has no column {name}", "a run says what ran where", works)


def sources(rows: Sequence[Row]) -> Iterator[str]:
    """The sources of some rows, each once, in order."""
    yield from dict.fromkeys(row.source for row in rows)
