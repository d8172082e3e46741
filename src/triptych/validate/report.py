"""What a validation finds: the JSON document and a line for each row."""

from __future__ import annotations

from typing import Any, NamedTuple


class Report(NamedTuple):
    """The figures of a table, and what became of each row."""

    document: dict[str, Any]
    rows: list[dict[str, Any]]
