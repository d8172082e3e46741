"""Runs one rank's part of a pipeline program: the same actions that were checked and drawn.

A receive is posted where the program says and waited for by the computation that needs it; a send
is issued and its buffer held until the end of the step. Each micro-batch carries its own shape,
known on every rank of the pipeline, so nothing but hidden states and their gradients travels.

Shapes: B batch, S sequence, s = S / tp under sequence parallelism (else S), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triptych.runtime.build.stage import StageModule
from triptych.runtime.comm import Communicator, Pending
from triptych.runtime.record import Recorder
from triptych.schedule.action import Action, Kind


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids [B, S] and labels [B, S]: `labels[t]` is the target of position t, -100 none."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(slots=True)
class _InFlight:
    """What a micro-batch leaves between its forward and its backward."""

    received: torch.Tensor | None
    output: torch.Tensor


class Interpreter:
    """Executes actions for one stage per rank.

    Args:
        stage: this rank's layers.
        forward, backward: communicators along the pipeline, one per direction.
        recorder: gets one span per computation and per wait.
        dtype, hidden, sequence_split: of the hidden states that travel, [B, S/split, H].

    """

    def __init__(
        self,
        stage: StageModule,
        *,
        forward: Communicator,
        backward: Communicator,
        recorder: Recorder,
        dtype: torch.dtype,
        hidden: int,
        sequence_split: int,
    ) -> None:
        self._stage = stage
        self._forward, self._backward = forward, backward
        self._recorder = recorder
        self._dtype, self._hidden, self._split = dtype, hidden, sequence_split
        self._run: dict[Kind, Callable[[int], None]] = {
            Kind.F: self._compute_forward,
            Kind.B: self._compute_backward,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }

    def run(
        self,
        actions: Sequence[Action],
        microbatches: Sequence[MicroBatch],
        scale: float | torch.Tensor,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> torch.Tensor | None:
        """Runs one step; the last stage returns the loss of each micro-batch [m], scaled.

        `before_last_backward` is called ahead of the backward after which gradients are final.
        """
        self._microbatches, self._scale = microbatches, scale
        self._arriving: dict[tuple[Kind, int], Pending] = {}
        self._leaving: list[Pending] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        last = max((i for i, a in enumerate(actions) if a.kind is Kind.B), default=None)
        for index, action in enumerate(actions):
            if index == last:
                before_last_backward()
            self._run[action.kind](action.microbatch)
        with self._recorder.span("pipeline_comm"):
            for pending in self._leaving:
                pending.wait()
        if not self._stage.is_last:
            return None
        return torch.stack([self._losses[i] for i in range(len(microbatches))])

    # ---- computation -------------------------------------------------------------------------

    def _compute_forward(self, index: int) -> None:
        microbatch = self._microbatches[index]
        received = self._arrived(Kind.RECV_F, index)
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        with self._recorder.span(f"{self._stage_label}F{index}"):
            output = self._stage(microbatch.input_ids, received)
            if self._stage.is_last:
                output = self._stage.loss(output, microbatch.labels, self._scale)
                self._losses[index] = output.detach()
            self._in_flight[index] = _InFlight(received, output)

    def _compute_backward(self, index: int) -> None:
        gradient = self._arrived(Kind.RECV_B, index)
        flight = self._in_flight.pop(index)
        with self._recorder.span(f"{self._stage_label}B{index}"):
            torch.autograd.backward(flight.output, gradient)
        if flight.received is not None:
            assert flight.received.grad is not None
            self._gradients[index] = flight.received.grad

    @property
    def _stage_label(self) -> int:
        return self._forward.index

    # ---- communication -----------------------------------------------------------------------

    def _send_forward(self, index: int) -> None:
        output = self._in_flight[index].output.detach()
        self._leaving.append(self._forward.start_send(output.contiguous(), self._forward.index + 1))
        if not torch.is_grad_enabled():
            del self._in_flight[index]

    def _receive_forward(self, index: int) -> None:
        source = self._forward.index - 1
        self._arriving[Kind.RECV_F, index] = self._forward.start_receive(self._empty(index), source)

    def _send_backward(self, index: int) -> None:
        gradient = self._gradients.pop(index).contiguous()
        self._leaving.append(self._backward.start_send(gradient, self._backward.index - 1))

    def _receive_backward(self, index: int) -> None:
        source = self._backward.index + 1
        self._arriving[Kind.RECV_B, index] = self._backward.start_receive(
            self._empty(index), source
        )

    def _arrived(self, kind: Kind, index: int) -> torch.Tensor | None:
        pending = self._arriving.pop((kind, index), None)
        if pending is None:
            return None
        with self._recorder.span("pipeline_comm"):
            return pending.wait()

    def _empty(self, index: int) -> torch.Tensor:
        ids_BS = self._microbatches[index].input_ids
        batch, length = ids_BS.shape
        shape = (batch, length // self._split, self._hidden)
        return torch.empty(shape, dtype=self._dtype, device=ids_BS.device)
