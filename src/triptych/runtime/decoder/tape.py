"""What a forward leaves for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from triptych.runtime.context.tiles import Documents


class Tape:
    """Tensors, last in, first out; and graphs of autograd, where a part has one of its own."""

    is_kept = True

    def __init__(
        self, tensors: Iterable[torch.Tensor] = (), graphs: list[Any] | None = None
    ) -> None:
        self.tensors = list(tensors)
        self.graphs: list[Any] = [] if graphs is None else graphs
        self.keep, self.take = self.tensors.append, self.tensors.pop


class NoTape(Tape):
    """Keeps nothing."""

    is_kept = False

    def __init__(self) -> None:
        super().__init__()
        self.keep = _forget


def _forget(_: torch.Tensor) -> None:
    return None


class Call(NamedTuple):
    """What a layer is called with beside hidden states; B is the number of rows."""

    batch: int
    rotary: tuple[torch.Tensor, torch.Tensor]
    documents: Documents | None
    positions: torch.Tensor | None
