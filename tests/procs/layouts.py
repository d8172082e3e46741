"""Tiny models, batches and a training run under a plan, for tests that compare layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import STRICT

from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.plan.ranks import Coordinates
from triptych.plan.share import Share
from triptych.runtime.engine import Engine, MicroBatch, OptimizerSettings, RouterSettings
from triptych.runtime.mesh import Mesh
from triptych.runtime.strict import StrictCommunicator

DOUBLE = Precision(
    parameter="fp64", gradient="fp64", reduction="fp64", master="fp64", moments="fp64"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A 4-layer Llama with 8 query and 2 KV heads."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **changes,
    }


@dataclass(frozen=True)
class Run:
    """What one layout gave: losses, norms, and whole logical tensors by kind and name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)


def batch_of(seed: int, sequences: int, length: int, vocab: int) -> list[tuple[Any, Any]]:
    """Sequences of random tokens; every third label or so is not trained."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(sequences):
        ids = torch.randint(vocab, (length,), generator=generator)
        labels = torch.randint(vocab, (length,), generator=generator)
        labels[torch.rand(length, generator=generator) < 0.3] = -100
        labels[0] = vocab - 1
        rows.append((ids, labels))
    return rows


def split(rows: Sequence[tuple[Any, Any]], plan: Plan, at: Coordinates) -> list[MicroBatch]:
    """This replica's part of a global batch, cut into micro-batches."""
    cut = [[rows[place] for place in chunk] for chunk in Share.of(plan, at).chunks(len(rows))]
    return [
        MicroBatch(torch.stack([r[0] for r in part]), torch.stack([r[1] for r in part]))
        for part in cut
    ]


def make_engine(
    plan: Plan,
    config: dict[str, Any],
    router: RouterSettings | None = None,
    seed: int = 1,
    freeze: Sequence[str] = (),
    **settings: Any,
) -> Engine:
    """An engine on this rank."""
    kv_heads = from_config(config, name="tiny").kv_heads
    mesh = Mesh.create(plan, kv_heads=kv_heads, timeout_s=60, strict=True)
    StrictCommunicator.is_on = STRICT
    optimizer = OptimizerSettings(**settings)
    return Engine.build(
        plan, config, mesh, seed=seed, optimizer=optimizer, freeze=freeze, router=router
    )


def strictly(step: int) -> None:
    """Every other step under strict comm: a run of two steps sees both kinds."""
    StrictCommunicator.is_on = STRICT or step % 2 == 1


def train(
    plan: Plan,
    config: dict[str, Any],
    *,
    steps: int = 2,
    sequences: int = 4,
    length: int = 24,
    gradients: bool = True,
    learning_rate: float = 1e-2,
    **settings: Any,
) -> Run:
    """Trains a few steps; returns losses, norms and this rank's tensors (see `merge`)."""
    engine = make_engine(plan, config, **settings)
    run = Run()
    pieces: list[Any] = []
    if gradients:
        _keep_first_gradients(engine, pieces)
    for step in range(steps):
        strictly(step)
        rows = batch_of(step, sequences, length, config["vocab_size"])
        microbatches = split(rows, plan, engine.mesh.coordinates)
        result = engine.step(microbatches, learning_rate)
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
    pieces += [(s.kind, s.name, s.shape, s.box, _array(s.tensor)) for s in engine.shards()]
    run.tensors.update({("pieces", ""): pieces})  # type: ignore[dict-item]
    return run


def _array(tensor: torch.Tensor) -> Any:
    """A copy for another process; 16-bit values as fp32, which numpy knows."""
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.detach().clone().numpy()


def _keep_first_gradients(engine: Engine, pieces: list[Any]) -> None:
    """Adds the first step's gradients to `pieces` when the step takes their norm."""
    squared_norm = engine.optimizer.squared_norm

    def look() -> torch.Tensor:
        if not pieces:
            pieces.extend(gradient_parts(engine))
        return squared_norm()

    engine.optimizer.squared_norm = look  # type: ignore[method-assign]


def gradient_parts(engine: Engine) -> list[Any]:
    """Gradients of the elements whose sum this rank holds: its shard under ZeRO."""
    from triptych.plan.layout import box_shape, flat_range_to_boxes, shift

    parts = []
    for piece in engine.optimizer.pieces:
        offset = 0
        for local in flat_range_to_boxes(box_shape(piece.slot.box), piece.start, piece.stop):
            shape = box_shape(local)
            count = torch.Size(shape).numel()
            values = piece.gradient[offset : offset + count].view(shape).clone().numpy()
            parts.append(
                (
                    "gradient",
                    piece.slot.name,
                    piece.slot.shape,
                    shift(local, piece.slot.box),
                    values,
                )
            )
            offset += count
    return parts


def merge(runs: Sequence[Run]) -> Run:
    """One run from all ranks' parts; checks that ranks that hold the same element agree."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for run in runs:
        assert run.losses == runs[0].losses and run.norms == runs[0].norms
        for kind, name, shape, box, values in run.tensors["pieces", ""]:  # type: ignore[misc]
            part = torch.from_numpy(values)
            target = whole.setdefault(
                (kind, name), torch.full(shape, float("nan"), dtype=part.dtype)
            )
            view = target[tuple(slice(a, b) for a, b in box)]
            known = ~view.isnan()
            assert torch.equal(view[known], part[known]), f"{kind} {name}: replicas differ"
            view.copy_(part)
    for key, tensor in whole.items():
        assert not tensor.isnan().any(), f"{key} is not covered"
    return Run(runs[0].losses, runs[0].norms, whole)


def assert_equal_runs(ours: Run, reference: Run, tolerance: float) -> None:
    """Losses, norms, gradients, weights and moments agree."""
    for mine, theirs in ((ours.losses, reference.losses), (ours.norms, reference.norms)):
        torch.testing.assert_close(
            torch.tensor(mine).double(),
            torch.tensor(theirs).double(),
            rtol=tolerance,
            atol=tolerance,
        )
    assert ours.tensors.keys() == reference.tensors.keys()
    for key, expected in reference.tensors.items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            ours.tensors[key],
            expected,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, key=key: f"{key}: {text}",
        )
