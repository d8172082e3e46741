"""Triptych plans, trains and serves large language models with hybrid parallelism.

The public functions live in `triptych.api`, which loads on first use, so that `import triptych`
and `triptych plan` stay fast and never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych import api as api

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module("triptych.api")
    raise AttributeError(f"module 'triptych' has no attribute {name!r}")
