"""The conjugate pairs of tensor and sequence parallelism, as autograd functions.

    forward        backward         used at
    identity       all-reduce       entry of a region, without sequence parallelism
    all-reduce     identity         exit of a region, without sequence parallelism
    all-gather     reduce-scatter   entry, with it (dimension 1: the sequence)
    reduce-scatter all-gather       exit, with it
    all-reduce     all-reduce       sums inside a region (a norm over all heads)

Source: Shoeybi et al. 2019, sec. 3 (f and g); Korthikanti et al. 2022, sec. 4.2.2 (g-bar).
Shapes: B batch, S sequence, s = S / tp its part on a rank, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.runtime.comm import Communicator


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.comm.all_reduce(grads[0].contiguous()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        x = x.contiguous()
        ctx.mark_dirty(x)
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.comm.all_reduce(grads[0].clone()), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsH: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return gather_sequence(x_BsH, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_sequence(grads[0], ctx.comm), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return scatter_sequence(x_BSH, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_sequence(grads[0], ctx.comm), None


def gather_sequence(x_BsH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """[B, s, H] of each rank to the whole [B, S, H]. No gradient."""
    batch, local, hidden = x_BsH.shape
    gathered = comm.all_gather(x_BsH.contiguous())
    if batch == 1:
        return gathered.view(1, comm.size * local, hidden)
    parts = gathered.view(comm.size, batch, local, hidden)
    return parts.transpose(0, 1).reshape(batch, comm.size * local, hidden)


def scatter_sequence(x_BSH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Sums [B, S, H] over the ranks and keeps this rank's [B, s, H]. No gradient."""
    batch, length, hidden = x_BSH.shape
    local = length // comm.size
    parts = x_BSH.view(batch, comm.size, local, hidden).transpose(0, 1).contiguous()
    return comm.reduce_scatter(parts.view(comm.size * batch, local, hidden))


def enter_region(x: torch.Tensor, comm: Communicator, sequence_parallel: bool) -> torch.Tensor:
    """What the linears of a tensor-parallel region see: the whole sequence on every rank."""
    if comm.size == 1:
        return x
    result: torch.Tensor = (_GatherSequence if sequence_parallel else _Copy).apply(x, comm)  # type: ignore[no-untyped-call]
    return result


def leave_region(x: torch.Tensor, comm: Communicator, sequence_parallel: bool) -> torch.Tensor:
    """The sum of the ranks' partial results: whole, or this rank's part of the sequence."""
    if comm.size == 1:
        return x
    result: torch.Tensor = (_ScatterSequence if sequence_parallel else _Reduce).apply(x, comm)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of the ranks' tensors, on which each rank goes on with work of its own."""
    if comm.size == 1:
        return x
    result: torch.Tensor = _Sum.apply(x, comm)  # type: ignore[no-untyped-call]
    return result
