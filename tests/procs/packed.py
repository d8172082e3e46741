"""Documents in packed rows and one by one, and what a layout makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from layouts import make_engine
from ranks import run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine
from triptych.runtime.microbatch import MicroBatch

Rows = tuple[tuple[int, ...], ...]
"""The lengths of the documents of each row."""


@dataclass(frozen=True)
class Answer:
    """Loss, trained tokens and whole gradients by name."""

    loss: float
    tokens: int
    gradients: dict[str, torch.Tensor]


def packed(rows: Rows, vocab: int, seed: int = 0) -> MicroBatch:
    """Random documents; the last token of each has no label."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (len(rows), sum(rows[0])), generator=draws)
    labels = ids.roll(-1, dims=1)
    for row, lengths in enumerate(rows):
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = -100
    return MicroBatch(ids, labels, documents=rows)


def one_by_one(whole: MicroBatch) -> list[MicroBatch]:
    """Each document as a micro-batch of its own."""
    assert whole.documents is not None
    return [
        MicroBatch(ids[None], labels[None])
        for row, lengths in enumerate(whole.documents)
        for ids, labels in zip(
            whole.input_ids[row].split(lengths), whole.labels[row].split(lengths), strict=True
        )
    ]


def answer(plan: Plan, config: dict[str, Any], microbatches: Sequence[MicroBatch]) -> Answer:
    """What a plan makes of micro-batches; data ranks take them in turn."""
    return whole(run_ranks(plan.world_size, on_a_rank, plan, config, microbatches))


def on_a_rank(plan: Plan, config: dict[str, Any], microbatches: Sequence[MicroBatch]) -> Any:
    """This rank's part of the answer."""
    return parts(make_engine(plan, config, clip_norm=0.0), microbatches)


def parts(engine: Engine, microbatches: Sequence[MicroBatch]) -> Any:
    """Loss, tokens and this rank's shards of the first moments: the gradients but for a factor."""
    at = engine.mesh.coordinates
    result = engine.step(microbatches[at.dp :: engine.plan.dp], 0.0)
    shards = [
        (s.name, s.shape, s.box, s.tensor.detach().clone().numpy())
        for s in engine.shards()
        if s.kind == "exp_avg"
    ]
    return result.loss, result.tokens, shards


def whole(answers: Sequence[Any]) -> Answer:
    """The parts of all ranks put together."""
    gradients: dict[str, torch.Tensor] = {}
    for loss, tokens, shards in answers:
        assert (loss, tokens) == answers[0][:2]
        for name, shape, box, values in shards:
            part = torch.from_numpy(values) / 0.1  # 1 - beta1
            target = gradients.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
            target[tuple(slice(a, b) for a, b in box)] = part
    return Answer(answers[0][0], answers[0][1], gradients)


def assert_same(ours: Answer, expected: Answer, tolerance: float) -> None:
    """Loss and every gradient agree."""
    assert ours.tokens == expected.tokens
    assert abs(ours.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss))
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, theirs in expected.gradients.items():
        torch.testing.assert_close(
            ours.gradients[name],
            theirs,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(theirs.abs().max())),
            msg=lambda text, name=name: f"{name}: {text}",
        )
