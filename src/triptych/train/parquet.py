"""Rows of Parquet files, a batch in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from triptych.errors import DataError

_BATCH_ROWS = 1024


def rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file. Raises DataError if it is damaged."""
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
