"""AdamW on the part of each bucket that this rank updates, with clipping folded into the step.

With Muon, buckets of matrices are dealt to the ranks in whole matrices, and updated by `muon.py`.

The update runs on pieces of this rank's shards. Gradient scaling and the non-finite guard go into
the fused kernel as tensors: the host never waits. Offloaded state lives in (pinned) host memory and
visits the device bucket by bucket, so that one bucket's state is there at a time; the arithmetic is
the same, and no host synchronisation is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from triptych.errors import PlanError
from triptych.plan.layout import box_shape
from triptych.plan.matrices import MUON, optimizer_problems
from triptych.plan.plan import Plan
from triptych.runtime.data.bucket import Bucket
from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.muon import Matrix, update_matrices
from triptych.runtime.data.pieces import Piece, pieces_of, shards_of
from triptych.runtime.data.slot import Slot
from triptych.runtime.precision import torch_dtype
from triptych.runtime.shard import Shard

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) with global-norm clipping; `clip_norm` 0 means none.

    `name` muon: matrices of the layers have Muon with `momentum`, all else AdamW.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    no_decay: frozenset[str] = frozenset()  # names of parameters, beside norms and biases
    clip_norm: float = 1.0

    def require_possible(self, plan: Plan) -> None:
        """Returns if a plan allows the optimizer. Raises PlanError otherwise."""
        if problems := [*optimizer_problems(plan, self.name)]:
            raise PlanError(problems)

    def decays(self, slot: Slot) -> bool:
        """True for a parameter with weight decay."""
        return slot.decays and slot.name not in self.no_decay

    def owns_whole(self, slot: Slot) -> bool:
        """True for a parameter that one rank updates whole: a matrix under Muon."""
        return self.name == MUON and slot.is_matrix and slot.trains


def update_rows(
    rows: Sequence[tuple[torch.Tensor, ...]],
    settings: OptimizerSettings,
    learning_rate: float,
    weight_decay: float,
    divisor: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """AdamW's fused update of rows of master, gradient, both moments and count of steps."""
    masters, gradients, averages, squares, steps = map(list, zip(*rows, strict=True))
    adamw(
        masters,
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=True,
        grad_scale=divisor,
        found_inf=found_inf,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=settings.eps,
        maximize=False,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """What the optimizer keeps of a bucket's shard: flat tensors by kind.

    `kept` holds the moments, and the master weights if they are a copy of their own. Matrices of
    Muon have one moment, and need no count of steps.
    """

    bucket: Bucket
    pieces: Sequence[Piece]
    kept: dict[str, torch.Tensor]
    steps: list[torch.Tensor]

    @property
    def is_muon(self) -> bool:
        """True for matrices of Muon."""
        return "exp_avg_sq" not in self.kept

    def tensors(self, kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Everything that an update reads, on the device."""
        return {
            "master": self.bucket.shard_values,
            **kept,
            "gradient": self.bucket.shard_gradients,
        }


class ShardedAdamW:
    """The optimizer state of a rank's shards and their update."""

    def __init__(self, buckets: GradientBuckets, plan: Plan, settings: OptimizerSettings) -> None:
        self._buckets = buckets
        self._settings = settings
        self._precision = plan.precision
        self.is_offloaded = plan.offload == "optimizer"
        self.states = [self._make_state(bucket) for bucket in buckets.trained]

    @property
    def pieces(self) -> list[Piece]:
        """Every piece that this rank updates."""
        return [piece for state in self.states for piece in state.pieces]

    def _make_state(self, bucket: Bucket) -> State:
        """Zero moments; master weights from the values if they are a copy."""
        values, precision = bucket.shard_values, self._precision
        kept = {}
        if precision.has_master:
            kept["master"] = self._home(values, torch_dtype(precision.master))
            kept["master"].copy_(values)
        pieces, is_muon = pieces_of(bucket), self._settings.owns_whole(bucket.slots[0])
        for kind in _MOMENTS[:1] if is_muon else _MOMENTS:
            kept[kind] = self._home(values, torch_dtype(precision.moments))
        steps = torch.zeros(
            0 if is_muon else len(pieces), dtype=torch.float32, device=values.device
        )
        return State(bucket=bucket, pieces=pieces, kept=kept, steps=list(steps.unbind()))

    def _home(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A zero tensor like a shard where state lives: beside it, or in host memory."""
        if not self.is_offloaded:
            return torch.zeros_like(values, dtype=dtype)
        return torch.zeros(values.shape, dtype=dtype, pin_memory=values.is_cuda)

    def squared_norm(self) -> torch.Tensor:
        """This rank's part of the squared gradient norm: each element counts on one rank only."""
        counted = [
            piece.gradient
            for piece in self.pieces
            if piece.slot.counted and piece.bucket.sharding.is_first_replica
        ]
        device = self._buckets.buckets[0].shard_gradients.device
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=device)
        # In fp64: else the last digits, which clipping passes on, depend on how pieces are cut.
        norms = torch._foreach_norm(counted, 2.0, torch.float64)
        return torch.stack(norms).square().sum()

    def step(
        self, learning_rate: float, norm: torch.Tensor, scale: torch.Tensor | None = None
    ) -> None:
        """Updates weights from gradients clipped by their global `norm`; skips if not finite.

        With a `scale` the gradients in the buckets are that many times the true ones, of `norm`.

        Afterwards this rank's shards are new, and parameters are, or will be when next gathered.
        """
        clip = self._settings.clip_norm
        divisor = (norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)
        if scale is not None:
            divisor = divisor * scale
        self._step(learning_rate, divisor, ~torch.isfinite(norm))

    def step_ahead(self, learning_rate: float) -> list[torch.Tensor]:
        """Updates from gradients as they are; returns what it changed, as it was before."""
        before = [tensor.clone() for tensor in self._changing()]
        one = torch.ones((), device=self._buckets.buckets[0].shard_values.device)
        self._step(learning_rate, one, ~torch.isfinite(one))
        return before

    def put_back(self, before: Sequence[torch.Tensor]) -> None:
        """Undoes `step_ahead`, bit by bit; parameters follow with the next update."""
        for tensor, value in zip(self._changing(), before, strict=True):
            tensor.copy_(value)

    def _changing(self) -> Iterator[torch.Tensor]:
        """What an update changes: moments, master weights, counts of steps."""
        for state in self.states:
            tensors = {"master": state.bucket.shard_values, **state.kept}
            yield from (*tensors.values(), *state.steps)

    def is_within(self, norm: torch.Tensor) -> torch.Tensor:
        """True if a norm is finite and asks for no clipping."""
        return norm <= (self._settings.clip_norm or torch.finfo(norm.dtype).max)

    def _step(self, learning_rate: float, divisor: torch.Tensor, is_skipped: torch.Tensor) -> None:
        found_inf = is_skipped.float()
        if self.is_offloaded:
            for state in self.states:
                self._visit(state, learning_rate, divisor.float(), found_inf)
        else:
            together = [(state, state.tensors(state.kept)) for state in self.states]
            self._update(together, learning_rate, divisor.float(), found_inf)
            self._write_back()
        self._buckets.gather_values()

    def _visit(
        self, state: State, learning_rate: float, divisor: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Updates one bucket's shard with its state fetched from host memory and brought back."""
        device = state.bucket.shard_values.device
        fetched = {
            kind: torch.empty_like(home, device=device).copy_(home, non_blocking=True)
            for kind, home in state.kept.items()
        }
        self._update([(state, state.tensors(fetched))], learning_rate, divisor, found_inf)
        if "master" in fetched:
            state.bucket.shard_values.copy_(fetched["master"])
        for kind, home in state.kept.items():
            home.copy_(fetched[kind], non_blocking=True)

    def _update(
        self,
        states: Sequence[tuple[State, dict[str, torch.Tensor]]],
        learning_rate: float,
        divisor: torch.Tensor,
        found_inf: torch.Tensor,
    ) -> None:
        for decays in (True, False):
            decay = self._settings.weight_decay if decays else 0.0
            matrices = list(self._matrices(states, decays))
            if matrices:
                update_matrices(
                    matrices,
                    learning_rate=learning_rate,
                    momentum=self._settings.momentum,
                    weight_decay=decay,
                    divisor=divisor,
                    found_inf=found_inf,
                )
            rows = list(self._rows(states, decays))
            if rows:
                update_rows(rows, self._settings, learning_rate, decay, divisor, found_inf)

    def _matrices(
        self, states: Sequence[tuple[State, dict[str, torch.Tensor]]], decays: bool
    ) -> Iterator[Matrix]:
        """Master, gradient and momentum of each of a rank's matrices that Muon updates."""
        kinds = ("master", "gradient", "exp_avg")
        for state, tensors in states:
            for piece in state.pieces if state.is_muon else ():
                if self._settings.decays(piece.slot) is decays:
                    shape = box_shape(piece.slot.box)
                    yield Matrix(*(tensors[kind][piece.here].view(shape) for kind in kinds))

    def _rows(
        self, states: Sequence[tuple[State, dict[str, torch.Tensor]]], decays: bool
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Master, gradient, moments and step count of each piece with or without weight decay."""
        kinds = ("master", "gradient", "exp_avg", "exp_avg_sq")
        for state, tensors in states:
            if state.is_muon:
                continue
            for piece, step in zip(state.pieces, state.steps, strict=True):
                if self._settings.decays(piece.slot) is decays:
                    yield (*(tensors[kind][piece.here] for kind in kinds), step)

    def _write_back(self) -> None:
        """Rounds master weights into the parameters that compute."""
        for state in self.states:
            if "master" in state.kept:
                state.bucket.shard_values.copy_(state.kept["master"])

    def after_load(self, step: int) -> None:
        """Takes loaded weights, masters and moments as the state after `step` updates."""
        for state in self.states:
            for count in state.steps:
                count.fill_(step)
        self._write_back()
        self._buckets.gather_values()

    def shards(self) -> list[Shard]:
        """Live boxes of the moments, and of the master weights if they are a copy."""
        kinds = [*_MOMENTS] + ["master"] * self._precision.has_master
        return [
            shard
            for kind in kinds
            for state in self.states
            if kind in state.kept
            for piece in state.pieces
            for shard in shards_of(piece, kind, state.kept[kind])
        ]
