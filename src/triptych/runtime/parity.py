"""Is a layout numerically the same as one process? A few steps of both, side by side.

Weights and tokens are drawn from a seed, so that no checkpoint and no text is needed. After one
AdamW step from zero the first moment is the clipped gradient but for a factor, which makes every
gradient visible through the shards that a checkpoint would save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from triptych.model.hf import from_config
from triptych.plan.families import family_of
from triptych.plan.layout import model_order
from triptych.plan.plan import Plan
from triptych.plan.share import Share
from triptych.plan.workload import Workload
from triptych.runtime.engine import Engine, MicroBatch, OptimizerSettings
from triptych.runtime.mesh import Mesh
from triptych.runtime.replicas import differing_replicas
from triptych.runtime.tensor.loss import IGNORED

_UNTRAINED = 0.2  # share of labels that do not count, so that token counts differ
_LEARNING_RATE = 1e-3
_OPTIMIZER = OptimizerSettings(eps=1e-2)  # a small one magnifies the noise of tiny gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a layout computed: `gradients` of the first step, and `weights` after the last.

    Both are whole, by name, on rank 0 and empty elsewhere. `replicas` names parameters whose copies
    are not bitwise equal over the ranks.
    """

    model_type: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest relative differences of two traces.

    `worst` is the gradient that differs most. `first` is the first parameter, in the order of a
    forward, whose gradient or weight differs by more than the tolerance; None if none does.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    worst: str
    first: str | None

    @property
    def largest(self) -> float:
        """The largest of the four."""
        return max(self.loss, self.norm, self.gradient, self.weight)


def trace(
    plan: Plan, config: Mapping[str, Any], workload: Workload, *, steps: int = 3, seed: int = 0
) -> Trace:
    """Trains a few steps on random tokens under a plan; collective over its ranks."""
    kv_heads = from_config(config, name="model").kv_heads
    mesh = Mesh.create(plan, kv_heads=kv_heads)
    engine = Engine.build(plan, config, mesh, seed=seed, optimizer=_OPTIMIZER)
    losses, norms = [], []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(steps):
        share = _share(Share.of(plan, mesh.coordinates), workload, engine.model.vocab, seed + step)
        result = engine.step(share, _LEARNING_RATE)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = _whole(engine, "exp_avg")
    return Trace(
        model_type=engine.model.family,
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=gradients,
        weights=_whole(engine, "weight"),
        replicas=tuple(differing_replicas(engine.shards())),
    )


def difference(one: Trace, other: Trace, tolerance: float) -> Difference:
    """How far two traces are apart. Both must be of one model."""
    gradients, weights = (
        {name: _relative(tensor, theirs[name]) for name, tensor in ours.items()}
        for ours, theirs in ((one.gradients, other.gradients), (one.weights, other.weights))
    )
    wrong = [
        name for found in (gradients, weights) for name in found if not found[name] <= tolerance
    ]
    worst = max(gradients, key=gradients.__getitem__)
    return Difference(
        loss=_largest(one.losses, other.losses),
        norm=_largest(one.norms, other.norms),
        gradient=gradients[worst],
        weight=max(weights.values()),
        worst=worst,
        first=min(wrong, key=partial(model_order, family_of(one.model_type)), default=None),
    )


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((other - one).abs().max()) / max(float(one.abs().max()), 1e-30)


def _largest(values: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(values, others, strict=True))


def _share(share: Share, workload: Workload, vocab: int, seed: int) -> list[MicroBatch]:
    """The micro-batches of one replica, out of a global batch that depends on the seed only."""
    draws = torch.Generator().manual_seed(seed)
    shape = (workload.global_batch, workload.sequence_length)
    ids, labels = (torch.randint(vocab, shape, generator=draws) for _ in range(2))
    labels[torch.rand(shape, generator=draws) < _UNTRAINED] = IGNORED
    chunks = share.chunks(workload.global_batch)
    return [MicroBatch(ids[rows], labels[rows]) for rows in map(list, chunks)]


def _whole(engine: Engine, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of one kind, put together on rank 0."""
    parts = [
        (shard.name, shard.shape, shard.box, shard.tensor.detach().cpu())
        for shard in engine.shards()
        if shard.kind == kind and shard.saved
    ]
    gathered: list[Any] | None = [parts]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(parts, gathered)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, box, values in (part for rank in gathered or [] for part in rank):
        target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        target[tuple(slice(start, stop) for start, stop in box)] = values
    return whole
