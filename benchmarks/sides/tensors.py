"""Tensor and sequence parallelism of torch: DTensor, with the loss over a divided vocabulary.

Tuned as torchtitan's plan for Llama: each region gathers its input once, norms run on a part of the
sequence, logits stay divided; AdamW is fused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from sides.setting import MicroBatch, Setting, Trainer, accumulate, make_adamw


def dtensor(setting: Setting) -> Trainer:
    """TP + SP + loss-parallel over all ranks."""
    model = setting.library_model()
    mesh = dist.init_device_mesh("cpu", (setting.ranks,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _layer_plan())
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    positions = torch.arange(setting.length)[None]

    def loss(part: MicroBatch) -> torch.Tensor:
        # The library would count positions on a part of the sequence.
        hidden = model.model(
            input_ids=part.input_ids, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden).flatten(0, 1)
        summed: Any = cross_entropy(logits, part.labels.flatten(), reduction="sum")
        return summed.to_local() / setting.tokens

    def around(is_last: bool) -> AbstractContextManager[None]:
        return loss_parallel()

    parameters = list(model.parameters())
    return accumulate(
        partial(setting.share, parts=1, index=0),
        loss,
        parameters,
        make_adamw(iter(parameters)),
        around,
    )


def _layer_plan() -> dict[str, Any]:
    def gathered(name: str) -> PrepareModuleInput:
        return PrepareModuleInput(
            input_kwarg_layouts={name: Shard(1)}, desired_input_kwarg_layouts={name: Replicate()}
        )

    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": gathered("hidden_states"),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
