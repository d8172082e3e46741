"""One parameter of a rank: its name and box, where it lives, and how its gradient arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from triptych.plan.families import is_norm
from triptych.plan.layout import Box, box_elements, expert_of, layer_of


class Sums(Protocol):
    """What makes partial sums whole: a communicator, or the tie of two layouts."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds the other ranks' parts, in place."""


class Room(Protocol):
    """Where a slot's gradient is added."""

    def open(self) -> None:
        """Makes the memory behind `Slot.gradient` usable."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One parameter of this rank: its logical name and shape, the box it holds, its duties.

    `counted` is True on the one tensor rank and stage whose gradient enters the norm, which is
    also the one that saves it. Over `before` its gradient is partial beside the data axis. `stage`
    is the one that uses the parameter, None if several of this rank's do. A frozen one (not
    `trains`) has no gradient.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    counted: bool
    before: Sums | None
    stage: int | None
    places: list[tuple[nn.Module, str]]
    trains: bool = True
    offset: int = 0
    filled: bool = False
    arrived: bool = False
    is_final: bool = False
    room: Room | None = None
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return box_elements(self.box)

    @property
    def is_expert(self) -> bool:
        """True for a part of a routed expert."""
        return expert_of(self.name) is not None

    @property
    def is_matrix(self) -> bool:
        """True for a matrix of a layer; embedding, positions and head are tables."""
        return len(self.shape) == 2 and not is_norm(self.name) and layer_of(self.name) is not None

    @property
    def decays(self) -> bool:
        """True for matrices: norms and biases have no weight decay."""
        return len(self.shape) > 1 and not is_norm(self.name)

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of the parameter's shape."""
        if self.filled:
            self.gradient.add_(gradient)
        else:
            self._open()
            self.gradient.copy_(gradient)
            self.filled = True

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input, in place where the types allow it."""
        if grad_TN.dtype != self.gradient.dtype:
            self.add(grad_TN.t() @ input_TK)
        elif self.filled:
            self.gradient.addmm_(grad_TN.t(), input_TK)
        else:
            self._open()
            torch.mm(grad_TN.t(), input_TK, out=self.gradient)
            self.filled = True

    def add_rows(self, grad_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
        """Adds a row's gradient for each id: a table's gradient is never made whole apart."""
        if not self.filled:
            self._open()
            self.gradient.zero_()
            self.filled = True
        # Unlike `index_add_` it sums in a fixed order on CUDA too.
        self.gradient.index_put_((ids_T,), grad_TH.to(self.gradient.dtype), accumulate=True)

    def _open(self) -> None:
        assert self.room is not None
        self.room.open()
