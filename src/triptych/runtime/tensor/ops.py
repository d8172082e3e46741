"""Collectives of tensor parallelism, and the same as operators that a compiler takes as they are.

`torch.compile` cannot look into a communicator. It sees operators that give a new tensor and knows
their shapes; a communicator is a number there. They run in the order of the data that they need:
in a block each needs the one before, so all ranks call them in the same order.

Shapes: B batch, S sequence, s = S / tp its part on a rank, H hidden.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from triptych.runtime.comm import Communicator, Pending

_NUMBERS = itertools.count()
_NUMBERED: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def number_of(comm: Communicator) -> int:
    """The number under which operators find a communicator."""
    if comm.number < 0:
        comm.number = next(_NUMBERS)
        _NUMBERED[comm.number] = comm
    return comm.number


def gather(x_BsH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """[B, s, H] of each rank to the whole [B, S, H]. No gradient."""
    return start_gather(x_BsH, comm)()


def start_gather(x_BsH: torch.Tensor, comm: Communicator) -> Callable[[], torch.Tensor]:
    """As `gather`, under way until what it returns is called."""
    batch, local, hidden = x_BsH.shape
    pending = comm.start_all_gather(x_BsH.contiguous())

    def wait() -> torch.Tensor:
        gathered = pending.wait()
        if batch == 1:
            return gathered.view(1, comm.size * local, hidden)
        parts = gathered.view(comm.size, batch, local, hidden)
        return parts.transpose(0, 1).reshape(batch, comm.size * local, hidden)

    return wait


def scatter(x_BSH: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Sums [B, S, H] over the ranks and keeps this rank's [B, s, H]. No gradient."""
    return start_scatter(x_BSH, comm).wait()


def start_scatter(x_BSH: torch.Tensor, comm: Communicator) -> Pending:
    """As `scatter`, under way until `wait`."""
    batch, length, hidden = x_BSH.shape
    local = length // comm.size
    parts = x_BSH.view(batch, comm.size, local, hidden).transpose(0, 1).contiguous()
    return comm.start_reduce_scatter(parts.view(comm.size * batch, local, hidden))


_SCHEMA = "(Tensor x, int comm) -> Tensor"


@torch.library.custom_op("triptych::all_reduce", mutates_args=(), schema=_SCHEMA)
def all_reduce(x: torch.Tensor, comm: int) -> torch.Tensor:
    """The sum of the ranks' tensors."""
    return _NUMBERED[comm].all_reduce(x.clone(memory_format=torch.contiguous_format))


@torch.library.custom_op("triptych::gather_sequence", mutates_args=(), schema=_SCHEMA)
def gather_sequence(x: torch.Tensor, comm: int) -> torch.Tensor:
    """As `gather`."""
    return gather(x, _NUMBERED[comm])


@torch.library.custom_op("triptych::scatter_sequence", mutates_args=(), schema=_SCHEMA)
def scatter_sequence(x: torch.Tensor, comm: int) -> torch.Tensor:
    """As `scatter`."""
    return scatter(x, _NUMBERED[comm])


@all_reduce.register_fake
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@gather_sequence.register_fake
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    batch, local, hidden = x.shape
    return x.new_empty(batch, local * _NUMBERED[comm].size, hidden)


@scatter_sequence.register_fake
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    batch, length, hidden = x.shape
    return x.new_empty(batch, length // _NUMBERED[comm].size, hidden)
