"""Rows of a folder that `datasets.Dataset.save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from triptych.errors import DataError


def rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set. Raises DataError if it is damaged."""
    try:
        yield from load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
