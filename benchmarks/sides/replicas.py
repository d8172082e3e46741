"""Data parallelism of torch: DDP, ZeroRedundancyOptimizer, FSDP2; and one process alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from sides.setting import Setting, Trainer, WithLoss, accumulate, compile_each, make_adamw


def alone(setting: Setting, compiled: bool = False) -> Trainer:
    """The same loop on one process without any parallelism."""
    model = WithLoss(setting)
    if compiled:
        compile_each(model.model.model.layers)
    parameters = list(model.parameters())
    return accumulate(
        partial(setting.share, parts=1, index=0),
        lambda part: model(part.input_ids, part.labels, 1 / setting.tokens),
        parameters,
        make_adamw(iter(parameters)),
    )


def ddp(setting: Setting, optimizer: Any = torch.optim.AdamW) -> Trainer:
    """DistributedDataParallel with gradients as bucket views."""
    model: Any = DistributedDataParallel(WithLoss(setting), gradient_as_bucket_view=True)
    return _replicas(
        setting, model, lambda last: nullcontext() if last else model.no_sync(), optimizer
    )


def zero_redundancy(setting: Setting) -> Trainer:
    """DDP with torch's ZeroRedundancyOptimizer around the same AdamW: ZeRO-1."""
    return ddp(setting, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW))


def fsdp2(setting: Setting, reshard: bool, each: bool, compiled: bool = False) -> Trainer:
    """FSDP2: parameters released after the forward or not, gradients reduced each micro-batch or
    on the last.
    """
    model: Any = WithLoss(setting)
    mesh = dist.init_device_mesh("cpu", (setting.ranks,))
    if compiled:
        compile_each(model.model.model.layers)
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def around(is_last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(is_last or each)
        return nullcontext()

    return _replicas(setting, model, around, torch.optim.AdamW)


def _replicas(setting: Setting, model: Any, around: Any, optimizer: Any) -> Trainer:
    """Both wrappers average gradients over the ranks, hence the scale."""
    scale = setting.ranks / setting.tokens
    parameters = list(model.parameters())
    return accumulate(
        partial(setting.share, parts=setting.ranks, index=dist.get_rank()),
        lambda part: model(part.input_ids, part.labels, scale),
        parameters,
        make_adamw(iter(parameters), optimizer),
        around,
        divisor=setting.ranks,
    )
