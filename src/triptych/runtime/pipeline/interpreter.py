"""Runs one rank's part of a pipeline program: the same actions that were checked and drawn.

A receive is posted where the program says and waited for by the computation that needs it; a send
is issued and its buffer held until the end of the step. Between stages of one rank tensors change
hands without a message. Each micro-batch carries its own shape, known on every rank of the
pipeline, so nothing but hidden states and their gradients travels.

Shapes: B batch, S sequence, s = S / tp under sequence parallelism (else S), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from triptych.runtime.build.stage import StageModule
from triptych.runtime.comm import Pending
from triptych.runtime.dropout import Masks
from triptych.runtime.expert.balance import Routed, RouterLog
from triptych.runtime.microbatch import MicroBatch
from triptych.runtime.pipeline.channels import Channels
from triptych.runtime.record import Recorder
from triptych.runtime.tensor.linear import Deferral
from triptych.schedule.action import Action, Kind

Key = tuple[int, int]
"""Stage and micro-batch."""

Head = Callable[[StageModule, torch.Tensor, torch.Tensor], torch.Tensor]
"""What is made of the last stage's hidden states and a micro-batch's labels."""


@dataclass(slots=True)
class _InFlight:
    """What a micro-batch leaves between its forward and its backward on a stage."""

    received: torch.Tensor | None
    output: torch.Tensor


@dataclass(slots=True)
class _Step:
    """The tensors of one run: where they are between actions."""

    microbatches: Sequence[MicroBatch]
    scale: float | torch.Tensor
    head: Head | None = None
    arriving: dict[tuple[Kind, Key], Pending] = field(default_factory=dict)
    handed: dict[tuple[Kind, Key], torch.Tensor] = field(default_factory=dict)
    leaving: list[Pending] = field(default_factory=list)
    in_flight: dict[Key, _InFlight] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class Interpreter:
    """Executes actions for the stages of a rank.

    Args:
        stages: this rank's stages by index.
        channels: where each stage's hidden states and gradients go and come from.
        deferral: keeps weight gradients between actions I and W.
        masks: of dropout, to be turned to the micro-batch that runs, or runs again.
        lowest_trained: the first stage that has something to train: no gradient goes below it.
        recorder: gets one span per computation and per wait.
        dtype, hidden, sequence_split: of the hidden states that travel, [B, S/split, H].
        router_log: what routers leave; None for a model without experts.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        *,
        channels: Channels,
        deferral: Deferral,
        recorder: Recorder,
        dtype: torch.dtype,
        hidden: int,
        sequence_split: int,
        masks: Masks | None = None,
        lowest_trained: int = 0,
        router_log: RouterLog | None = None,
    ) -> None:
        self._stages = stages
        self._channels = channels
        self._deferral, self._masks, self._lowest = deferral, masks, lowest_trained
        self._recorder = recorder
        self._router_log = router_log
        self._dtype, self._hidden, self._split = dtype, hidden, sequence_split
        self._do: dict[Kind, Callable[[_Step, Key], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
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
        begin_final: Callable[[int, bool], None] = lambda stage, weights: None,
        look_back: tuple[int, Callable[[], bool]] = (-1, lambda: False),
        head: Head | None = None,
    ) -> torch.Tensor | None:
        """Runs one step; the rank of the last stage returns each micro-batch's loss [m], scaled.

        `begin_final(stage, weights)` is called ahead of the action that makes a stage's gradients
        final: those of its linears' weights, and the rest. `look_back` is a number of actions and
        what to ask after them: whether weights changed, so that they must run again. A `head` makes
        something else than the loss of the last stage's hidden states and labels.
        """
        step = _Step(microbatches, scale, head)
        finals = final_actions(actions)
        for index, action in enumerate(actions):
            if index == look_back[0] and look_back[1]():
                step = self._again(step, actions[:index])
            for stage, weights in finals.get(index, ()):
                begin_final(stage, weights)
            self._do[action.kind](step, (action.stage, action.microbatch))
        self._end_sends(step)
        if not step.losses:
            return None
        return torch.stack([step.losses[i] for i in range(len(microbatches))])

    def _again(self, step: _Step, actions: Sequence[Action]) -> _Step:
        """Forgets what was run, and runs it again; every rank does the same."""
        for pending in step.arriving.values():
            pending.wait()
        self._end_sends(step)
        again = _Step(step.microbatches, step.scale, step.head)
        for action in actions:
            self._do[action.kind](again, (action.stage, action.microbatch))
        return again

    def _end_sends(self, step: _Step) -> None:
        with self._recorder.span("pipeline_comm"):
            for pending in step.leaving:
                pending.wait()

    # ---- computation -------------------------------------------------------------------------

    def _forward(self, step: _Step, key: Key) -> None:
        stage, microbatch = self._stages[key[0]], step.microbatches[key[1]]
        received = self._arrived(step, Kind.RECV_F, key)
        if received is not None and torch.is_grad_enabled() and key[0] > self._lowest:
            received.requires_grad_()
        self._turn_masks(microbatch)
        with self._recorder.span(f"{key[0]}F{key[1]}"):
            ids, positions = microbatch.input_ids, microbatch.positions
            routed = self._follow(microbatch, step.scale)
            output = stage(ids, received, positions, microbatch.documents, routed=routed)
            if stage.is_last and step.head is not None:
                output = step.head(stage, output, microbatch.labels)
            elif stage.is_last:
                output = stage.loss(output, microbatch.labels, step.scale)
            if stage.is_last:
                step.losses[key[1]] = output.detach()
        step.in_flight[key] = _InFlight(received, output)
        if key[0] + 1 in self._stages:
            step.handed[Kind.RECV_F, (key[0] + 1, key[1])] = output.detach()

    def _follow(self, microbatch: MicroBatch, scale: float | torch.Tensor) -> Routed | None:
        if self._router_log is None or not torch.is_grad_enabled():
            return None
        return self._router_log.follow(microbatch.labels, scale)

    def _backward(self, step: _Step, key: Key) -> None:
        gradient = self._arrived(step, Kind.RECV_B, key)
        flight = step.in_flight.pop(key)
        self._turn_masks(step.microbatches[key[1]])
        with self._recorder.span(f"{key[0]}B{key[1]}"):
            torch.autograd.backward(flight.output, gradient)
        self._pass_gradient(step, key, flight)

    def _input_gradient(self, step: _Step, key: Key) -> None:
        gradient = self._arrived(step, Kind.RECV_B, key)
        flight = step.in_flight.pop(key)
        self._turn_masks(step.microbatches[key[1]])
        with self._recorder.span(f"{key[0]}I{key[1]}"):
            self._deferral.begin()
            torch.autograd.backward(flight.output, gradient)
            self._deferral.end(key)
        self._pass_gradient(step, key, flight)

    def _weight_gradient(self, step: _Step, key: Key) -> None:
        with self._recorder.span(f"{key[0]}W{key[1]}"):
            self._deferral.run(key)

    def _turn_masks(self, microbatch: MicroBatch) -> None:
        if self._masks is not None:
            length = microbatch.input_ids.shape[1]
            self._masks.turn_to(microbatch.first, length, microbatch.places)

    def _pass_gradient(self, step: _Step, key: Key, flight: _InFlight) -> None:
        if flight.received is None or key[0] <= self._lowest:
            return
        assert flight.received.grad is not None
        if key[0] - 1 in self._stages:
            step.handed[Kind.RECV_B, (key[0] - 1, key[1])] = flight.received.grad
        else:
            step.gradients[key] = flight.received.grad

    # ---- communication -----------------------------------------------------------------------

    def _send_forward(self, step: _Step, key: Key) -> None:
        output = step.in_flight[key].output.detach().contiguous()
        step.leaving.append(self._channels.send_forward(output, key[0]))
        if not torch.is_grad_enabled() or key[0] < self._lowest:
            del step.in_flight[key]

    def _receive_forward(self, step: _Step, key: Key) -> None:
        pending = self._channels.receive_forward(self._empty(step, key), key[0])
        step.arriving[Kind.RECV_F, key] = pending

    def _send_backward(self, step: _Step, key: Key) -> None:
        gradient = step.gradients.pop(key).contiguous()
        step.leaving.append(self._channels.send_backward(gradient, key[0]))

    def _receive_backward(self, step: _Step, key: Key) -> None:
        pending = self._channels.receive_backward(self._empty(step, key), key[0])
        step.arriving[Kind.RECV_B, key] = pending

    def _arrived(self, step: _Step, kind: Kind, key: Key) -> torch.Tensor | None:
        """What the neighbouring stage made, from a message or from this rank's own hands."""
        pending = step.arriving.pop((kind, key), None)
        if pending is None:
            return step.handed.pop((kind, key), None)
        with self._recorder.span("pipeline_comm"):
            return pending.wait()

    def _empty(self, step: _Step, key: Key) -> torch.Tensor:
        ids_BS = step.microbatches[key[1]].input_ids
        batch, length = ids_BS.shape
        shape = (batch, length // self._split, self._hidden)
        return torch.empty(shape, dtype=self._dtype, device=ids_BS.device)


_MAKES = {True: (Kind.B, Kind.W), False: (Kind.B, Kind.I)}
"""Which actions give gradients to the weights of linears, and to everything else."""


def final_actions(actions: Sequence[Action]) -> dict[int, list[tuple[int, bool]]]:
    """Index of an action -> the (stage, weights) whose gradients it makes final."""
    last: dict[tuple[int, bool], int] = {}
    for index, action in enumerate(actions):
        for weights, kinds in _MAKES.items():
            if action.kind in kinds:
                last[action.stage, weights] = index
    finals: dict[int, list[tuple[int, bool]]] = {}
    for key, index in last.items():
        finals.setdefault(index, []).append(key)
    return finals
