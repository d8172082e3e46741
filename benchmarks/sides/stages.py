"""Pipeline parallelism of torch: `torch.distributed.pipelining`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from sides.setting import Setting, Trainer, clip, compile_each, make_adamw
from triptych.plan.plan import part

KINDS: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


class Cut(torch.nn.Module):
    """Some layers of the library's model, with its ends where they belong."""

    def __init__(self, model: Any, start: int, stop: int, layers: int) -> None:
        super().__init__()
        trunk = model.model
        self.embedding = trunk.embed_tokens if start == 0 else None
        self.layers = trunk.layers[start:stop]
        self.norm = trunk.norm if stop == layers else None
        self.head = model.lm_head if stop == layers else None
        self.rotary = trunk.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids or hidden states to hidden states, of which the last stage makes the loss."""
        hidden = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
            )
        return hidden if self.norm is None else self.norm(hidden)


class HeadSink:
    """Adds the head's weight gradient during the forward.

    A split backward passes the loss twice, which the in-place backward of our loss does not allow.
    """

    def __init__(self, head: torch.nn.Parameter) -> None:
        self.head = head

    def add_product(self, grad_TN: torch.Tensor, input_TK: torch.Tensor) -> None:
        """Adds grad^T x input."""
        if self.head.grad is None:
            self.head.grad = grad_TN.T @ input_TK
        else:
            self.head.grad.addmm_(grad_TN.T, input_TK)

    def arrive(self) -> None:
        """Nothing waits for it."""


def pipelining(setting: Setting, schedule: str, compiled: bool = False) -> Trainer:
    """A schedule of torch over all ranks: two stages a rank, but for 1F1B."""
    count = setting.ranks * (1 if schedule == "1f1b" else 2)
    model = setting.library_model()
    mine = _mine(schedule, setting.ranks, dist.get_rank())
    stages = {
        index: Cut(model, *part(setting.layers, count, index), setting.layers) for index in mine
    }
    if compiled:
        compile_each(layer for stage in stages.values() for layer in stage.layers)
    head = model.lm_head.weight
    sink = HeadSink(head) if schedule == "zb-v" else None
    weight = head if sink is None else head.detach()
    pipeline = [
        PipelineStage(stage, index, count, torch.device("cpu"), **_shapes(setting, index))
        for index, stage in stages.items()
    ]
    kind = KINDS[schedule]
    runner = kind(
        pipeline[0] if schedule == "1f1b" else pipeline,
        n_microbatches=setting.sequences // setting.microbatch,
        loss_fn=lambda hidden, labels: setting.loss(
            hidden, weight, labels, 1 / setting.tokens, sink
        ),
        scale_grads=False,
    )
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = make_adamw(iter(parameters))
    first, last = 0 in stages, count - 1 in stages

    def step(index: int) -> float:
        batch = setting.batch(index)
        losses: list[torch.Tensor] = []
        inputs = (batch.input_ids,) if first else ()
        target = {"target": batch.labels, "losses": losses} if last else {}
        runner.step(*inputs, **target, return_outputs=False)
        clip(parameters, over_ranks=True)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).detach().sum() if last else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    return step


def _mine(schedule: str, ranks: int, rank: int) -> tuple[int, ...]:
    """The stages of a rank."""
    if schedule == "1f1b":
        return (rank,)
    return (rank, 2 * ranks - 1 - rank) if schedule == "zb-v" else (rank, rank + ranks)


def _shapes(setting: Setting, index: int) -> dict[str, torch.Tensor]:
    """What goes in and out of a stage, so that nothing is inferred in the first step."""
    ids = torch.zeros(setting.microbatch, setting.length, dtype=torch.int64, device="meta")
    shape = (*ids.shape, setting.config["hidden_size"])
    hidden = torch.zeros(shape, device="meta", requires_grad=True)
    return {"input_args": hidden if index else ids, "output_args": hidden}
