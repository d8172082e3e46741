"""What the loop sees of the engine, the checkpoints and the memory: what it calls of them.

A few lines of a test can stand for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from triptych.runtime.data.live import LiveBytes
from triptych.runtime.engine import MicroBatch, RouterResult
from triptych.runtime.scaling import Scaling
from triptych.schedule.timeline import Timeline
from triptych.train.result import Position


class Step(Protocol):
    """What the loop reads of a step's result; on a GPU reading waits for the device."""

    @property
    def loss(self) -> float:
        """Mean over the trained tokens of the global batch."""

    @property
    def grad_norm(self) -> float:
        """Of the whole gradient, before clipping."""

    @property
    def tokens(self) -> int:
        """Trained tokens of the global batch."""

    @property
    def router(self) -> RouterResult | None:
        """Losses of routers, dropped tokens; None without experts."""

    @property
    def flagged(self) -> bool:
        """True if a rank raised its flag with this step."""

    @property
    def scaling(self) -> Scaling | None:
        """What loss scaling did, if there is any."""

    @property
    def time_s(self) -> Mapping[str, float]:
        """Seconds by term."""

    @property
    def bytes_sent(self) -> Mapping[str, int]:
        """Bytes by mesh axis."""


class Trains(Protocol):
    """What the loop needs of an engine. All calls are collective."""

    def step(
        self, microbatches: Sequence[MicroBatch], learning_rate: float, flag: bool = False
    ) -> Step:
        """One optimizer step; flagged on all ranks if one raises its flag."""

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Summed loss and tokens of one global batch."""

    def timeline(self) -> Timeline:
        """The spans of the last step."""

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if one of them says so."""

    def non_finite(self) -> list[str]:
        """The parameters whose last gradients are not finite."""

    def differing_replicas(self) -> list[str]:
        """The parameters whose copies differ, with the ranks."""

    def live_bytes(self) -> LiveBytes:
        """Bytes of the model's state on this rank, by term."""

    def all_spans(self) -> list[tuple[int, str, float, float]]:
        """The spans of the last step on all ranks; on rank 0."""


class Saves(Protocol):
    """Writes checkpoints; collective."""

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint that is known."""

    def save(
        self, position: Position, eval_loss: float | None = None, *, waits: bool = False
    ) -> None:
        """Begins a checkpoint at `position`; it is complete on return if the call `waits`."""


class Memory(Protocol):
    """Knows the peak memory of this rank and, after `share`, of the largest."""

    def share(self) -> None:
        """Learns the largest rank's; collective."""

    def own_bytes(self) -> int:
        """Peak bytes of this rank."""

    def largest_bytes(self) -> int:
        """Bytes of the largest rank, as far as known."""
