"""How a configuration scales its rotary frequencies: the kinds that are known, by name.

Configurations say it under `rope_parameters` (flat, or one table for each kind of layer) or, before
that, `rope_scaling`, with the kind under `rope_type` or `type`. The library applies it; what it
does not know it may leave out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from triptych.errors import ModelError, Problem

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "su")
"""`su` is Phi-3's first name for `longrope`."""


def require_known_rotary(config: Mapping[str, Any]) -> None:
    """Returns if every kind of scaling is known. Raises ModelError with the names otherwise."""
    unknown = [kind for kind in dict.fromkeys(_kinds(config)) if kind not in KINDS]
    if unknown:
        what = ", ".join(f"rope_type = {kind!r}" for kind in unknown)
        rule = "rotary frequencies are scaled as the model was trained"
        raise ModelError(Problem(what, rule, "rope_type = " + ", ".join(KINDS)))


def _kinds(config: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if not isinstance(table, Mapping):
            continue
        nested = [value for value in table.values() if isinstance(value, Mapping)]
        for each in nested or [table]:
            yield each.get("rope_type") or each.get("type") or "default"
