"""What `triptych validate` can hold a table of runs against, by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triptych.validate.report import Report
from triptych.validate.serve import validate_serving
from triptych.validate.train import validate_training

TASKS: Mapping[str, Callable[[Path], Report]] = {
    "train": validate_training,
    "serve": validate_serving,
}
"""Each reads a table and returns its figures; raises InputError if the file is no such table."""
