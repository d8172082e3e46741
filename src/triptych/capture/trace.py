"""What a module did in one forward pass, as values: no torch here, so that reading it is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

OUTSIDE = -1
"""The layer of what happens in front of the first one and behind the last one."""


class Attended(NamedTuple):
    """What an attention was called with; heads and widths of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    softcapped: bool
    sinks: bool
    dropout: bool


class Read(NamedTuple):
    """A tensor that a call reads: made by which call (-1: the token ids), elements per token."""

    source: int
    elements: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tensor function, per token.

    `module` is the path of the innermost module, `norm` that of the norm the call is part of;
    `weights` are paths of parameters, `chosen_by` the call whose result picked one out of
    several (experts).
    """

    function: str
    layer: int
    module: str
    norm: str | None
    reads: tuple[Read, ...]
    weights: tuple[str, ...]
    elements: float
    width: int  # elements of the last dimension of its result
    attended: Attended | None = None
    chosen_by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All calls of a forward pass that saw the tokens, in their order, and the module's sizes.

    `shapes` are of the module's parameters, each once; `tables` the paths of the token table and
    of the head's matrix.
    """

    calls: tuple[Call, ...]
    shapes: Mapping[str, tuple[int, ...]]
    layers: tuple[str, ...]  # paths
    kinds: tuple[str, ...]  # class of each layer
    tables: tuple[str, str]
