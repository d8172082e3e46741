"""AdamW on the part of each bucket that this rank updates, with clipping folded into the step.

The update runs on pieces: the overlap of a parameter's slot with the rank's shard of its bucket
(the whole slot without ZeRO). Pieces keep names, so weight decay groups and checkpoints need no
special case. Gradient scaling and the non-finite guard go into the fused kernel as tensors: the
host never waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from triptych.plan.layout import box_shape, flat_range_to_boxes, shift
from triptych.plan.plan import Plan
from triptych.runtime.data.buckets import Bucket, GradientBuckets, Slot
from triptych.runtime.precision import torch_dtype
from triptych.runtime.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) with global-norm clipping; `clip_norm` 0 means none."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """Elements [start, stop) of a slot, with the state that this rank keeps for them."""

    slot: Slot
    start: int
    stop: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class ShardedAdamW:
    """The optimizer state of a rank's shards and their update."""

    def __init__(self, buckets: GradientBuckets, plan: Plan, settings: OptimizerSettings) -> None:
        self._buckets = buckets
        self._plan = plan
        self._settings = settings
        self._masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pieces = [piece for b in buckets.buckets for piece in self._pieces(b)]
        self._optimizer = self._make_optimizer()

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        """This rank's pieces of a bucket; state is allocated flat, one tensor a bucket and kind."""
        precision = self._plan.precision
        start, stop = bucket.shard(self._plan.zero)
        values = bucket.values[start:stop]
        master = values
        if precision.has_master:
            master = values.to(torch_dtype(precision.master))
            self._masters.append((values, master))
        moments = [torch.zeros_like(master, dtype=torch_dtype(precision.moments)) for _ in "mv"]
        gradients = bucket.gradients[start:stop]
        pieces = []
        for slot in bucket.slots:
            first = max(start, slot.offset)
            last = min(stop, slot.offset + slot.elements)
            if first < last:
                here = slice(first - start, last - start)
                piece = Piece(
                    slot=slot,
                    start=first - slot.offset,
                    stop=last - slot.offset,
                    master=nn.Parameter(master[here]),
                    gradient=gradients[here],
                    exp_avg=moments[0][here],
                    exp_avg_sq=moments[1][here],
                )
                pieces.append(piece)
        return pieces

    def _make_optimizer(self) -> torch.optim.AdamW:
        settings = self._settings
        groups = [
            {
                "params": [p.master for p in self.pieces if p.slot.decays is decays],
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]] or [{"params": [nn.Parameter(torch.zeros(1))]}],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for piece in self.pieces:
            piece.master.grad = piece.gradient
            optimizer.state[piece.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=piece.master.device),
                "exp_avg": piece.exp_avg,
                "exp_avg_sq": piece.exp_avg_sq,
            }
        return optimizer

    def squared_norm(self, data_index: int) -> torch.Tensor:
        """This rank's part of the squared gradient norm: each element counts on one rank only."""
        counted = [
            piece.gradient
            for piece in self.pieces
            if piece.slot.counted and (self._plan.zero > 0 or data_index == 0)
        ]
        device = self.pieces[0].gradient.device if self.pieces else None
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.stack(torch._foreach_norm(counted)).double()
        return norms.square().sum()

    def step(self, learning_rate: float, norm: torch.Tensor) -> None:
        """Updates weights from gradients clipped by their global `norm`; skips if not finite.

        Afterwards the parameters of this rank's shards are new; `gather_values` spreads them.
        """
        clip = self._settings.clip_norm
        divisor = (norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)
        optimizer = self._optimizer
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        self._write_back()
        self._buckets.gather_values()

    def _write_back(self) -> None:
        """Rounds master weights into the parameters that compute."""
        for values, master in self._masters:
            values.copy_(master)

    def after_load(self, step: int) -> None:
        """Takes loaded weights, masters and moments as the state after `step` updates."""
        for piece in self.pieces:
            self._optimizer.state[piece.master]["step"].fill_(step)
        self._write_back()
        self._buckets.gather_values()

    def shards(self, data_index: int) -> list[Shard]:
        """Live boxes of the moments, and of the master weights if they are a copy."""
        kinds = ["exp_avg", "exp_avg_sq"] + ["master"] * self._plan.precision.has_master
        saves = self._plan.zero > 0 or data_index == 0
        return [
            shard
            for kind in kinds
            for piece in self.pieces
            for shard in _shards(piece, kind, saves)
        ]


def _shards(piece: Piece, kind: str, saves: bool) -> list[Shard]:
    """A piece is a flat range of a box: a few boxes, contiguous one after the other."""
    flat: torch.Tensor = getattr(piece, kind).detach()
    slot, shards, offset = piece.slot, [], 0
    for local in flat_range_to_boxes(box_shape(slot.box), piece.start, piece.stop):
        shape = box_shape(local)
        elements = torch.Size(shape).numel()
        shard = Shard(
            kind=kind,
            name=slot.name,
            shape=slot.shape,
            box=shift(local, slot.box),
            tensor=flat[offset : offset + elements].view(shape),
            saved=saves and slot.counted,
        )
        shards.append(shard)
        offset += elements
    return shards
