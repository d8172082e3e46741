"""The capture where it is needed and can be had: it takes seconds to load and packages to run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from triptych.errors import ModelError
from triptych.model.model import Model


def captured(config: Mapping[str, Any], name: str) -> Model:
    """The model of a configuration as the installed `transformers` builds it.

    Raises ModelError with the reason if that cannot be had.
    """
    try:
        build = importlib.import_module("triptych.capture.build")
    except ImportError as error:
        needs = "torch and transformers, which are not installed (pip install 'triptych[run]')"
        raise ModelError(f"reading it off its module takes {needs}") from error
    model: Model = build.capture(config, name)
    return model
