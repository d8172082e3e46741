"""The ways between stages: a group per direction of travel, so that no two messages wait in turn.

Activations and their gradients have groups of their own, and so have messages to a higher and to
a lower pipeline rank: with several stages a rank both may travel between the same two ranks, and
on NCCL one communicator would put them in one queue. Each queue then carries messages of one kind,
from one rank to another, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.runtime.comm import Communicator, Pending


class Channels:
    """Sends and receives by stage.

    Args:
        placement: the pipeline rank of each stage.
        forward, backward: communicators along the pipeline for activations and for gradients,
            each as (to a higher rank, to a lower rank).
    """

    def __init__(
        self,
        placement: Sequence[int],
        *,
        forward: tuple[Communicator, Communicator],
        backward: tuple[Communicator, Communicator],
    ) -> None:
        self._placement = placement
        self._forward, self._backward = forward, backward

    def send_forward(self, output: torch.Tensor, stage: int) -> Pending:
        """Sends a stage's output to the next stage."""
        return self._send(self._forward, output, stage, stage + 1)

    def receive_forward(self, out: torch.Tensor, stage: int) -> Pending:
        """Receives a stage's input from the stage before."""
        return self._receive(self._forward, out, stage - 1, stage)

    def send_backward(self, gradient: torch.Tensor, stage: int) -> Pending:
        """Sends the gradient of a stage's input to the stage before."""
        return self._send(self._backward, gradient, stage, stage - 1)

    def receive_backward(self, out: torch.Tensor, stage: int) -> Pending:
        """Receives the gradient of a stage's output from the next stage."""
        return self._receive(self._backward, out, stage + 1, stage)

    def _send(
        self, pair: tuple[Communicator, Communicator], tensor: torch.Tensor, stage: int, to: int
    ) -> Pending:
        source, target = self._placement[stage], self._placement[to]
        return pair[target < source].start_send(tensor, target)

    def _receive(
        self, pair: tuple[Communicator, Communicator], out: torch.Tensor, stage: int, at: int
    ) -> Pending:
        source, target = self._placement[stage], self._placement[at]
        return pair[target < source].start_receive(out, source)
