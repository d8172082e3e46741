"""The conjugate pairs of tensor and sequence parallelism, as autograd functions.

    forward        backward         used at
    identity       all-reduce       entry of a region, without sequence parallelism
    all-reduce     identity         exit of a region, without sequence parallelism
    all-gather     reduce-scatter   entry, with it (dimension 1: the sequence)
    reduce-scatter all-gather       exit, with it
    all-reduce     all-reduce       sums inside a region (a norm over all heads)

Traced by `torch.compile` they are the same functions over operators (`ops.py`). Linears that alone
read what has entered do its backward themselves, behind their own work (`entered.py`).

Source: Shoeybi et al. 2019, sec. 3 (f and g); Korthikanti et al. 2022, sec. 4.2.2 (g-bar).
Shapes: B batch, S sequence, s = S / tp its part on a rank, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.runtime.comm import Communicator
from triptych.runtime.tensor import ops
from triptych.runtime.tensor.entered import Entered, Region, mark_entered


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0].contiguous(), ctx.comm), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _sum(x, comm)
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
        return _sum(x.clone(), comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grads[0].clone(), ctx.comm), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsH: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _gather(x_BsH, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(grads[0], ctx.comm), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _scatter(x_BSH, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(grads[0], ctx.comm), None


def _sum(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum over the ranks, in place where that can be."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = ops.all_reduce(x, comm.number)
        return made
    return comm.all_reduce(x)


def _gather(x_BsH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    if torch.compiler.is_compiling():
        made: torch.Tensor = ops.gather_sequence(x_BsH, comm.number)
        return made
    return ops.gather(x_BsH, comm)


def _scatter(x_BSH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    if torch.compiler.is_compiling():
        made: torch.Tensor = ops.scatter_sequence(x_BSH, comm.number)
        return made
    return ops.scatter(x_BSH, comm)


def enter_region(
    x: torch.Tensor, comm: Communicator, sequence_parallel: bool, *, for_products: bool = False
) -> torch.Tensor:
    """What the linears of a tensor-parallel region see: the whole sequence on every rank.

    Where it is read by products of one input alone (`for_products`), their backward does the
    backward of this behind their work (`Entered`).
    """
    if comm.size == 1:
        return x
    result: torch.Tensor = (_GatherSequence if sequence_parallel else _Copy).apply(x, comm)  # type: ignore[no-untyped-call]
    if for_products and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        mark_entered(result, Entered(x, Region(comm, sequence_parallel)))
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
