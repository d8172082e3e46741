"""Entry and exit of a tensor-parallel region, with their backwards (`tensor/functions.py`)."""

from __future__ import annotations

import torch

from triptych.runtime.comm import Communicator
from triptych.runtime.tensor import ops


class Region:
    """Tokens [T, H] of whole sequences inside, with sequence parallelism of a part outside."""

    def __init__(self, comm: Communicator, sequence_parallel: bool) -> None:
        self._comm, self._is_split = comm, sequence_parallel
        self.is_alone = comm.size == 1

    def enter(self, x_tH: torch.Tensor, batch: int) -> torch.Tensor:
        """What the products of the region see."""
        return self._gather(x_tH, batch) if self._is_split else x_tH

    def leave(self, y_TH: torch.Tensor, batch: int) -> torch.Tensor:
        """The sum of the ranks' partial results, which may be in place."""
        return self._scatter(y_TH, batch) if self._is_split else self._comm.all_reduce(y_TH)

    def leave_backward(self, grad_tH: torch.Tensor, batch: int) -> torch.Tensor:
        """The gradient of each rank's partial result."""
        return self._gather(grad_tH, batch) if self._is_split else grad_tH

    def enter_backward(self, grad_TH: torch.Tensor, batch: int) -> torch.Tensor:
        """The gradient of what entered, which may be in place."""
        return self._scatter(grad_TH, batch) if self._is_split else self._comm.all_reduce(grad_TH)

    def _gather(self, x_tH: torch.Tensor, batch: int) -> torch.Tensor:
        whole = ops.gather(x_tH.view(batch, -1, x_tH.shape[-1]), self._comm)
        return whole.view(-1, x_tH.shape[-1])

    def _scatter(self, x_TH: torch.Tensor, batch: int) -> torch.Tensor:
        part = ops.scatter(x_TH.view(batch, -1, x_TH.shape[-1]), self._comm)
        return part.view(-1, x_TH.shape[-1])
