"""Turns a stage's modules into their tensor-parallel form, in place, keeping parameter names.

A region is a child of a decoder layer that ends in a row-parallel linear: attention or MLP. Its
input is gathered (or copied) once for all column-parallel linears, its output reduced once. Where
both stand side by side behind one norm they are one region: the first leaves its partial sum to
the second.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from triptych.model.model import Model
from triptych.plan.families import Family, family_of
from triptych.plan.layout import kv_head_range, query_head_range
from triptych.plan.plan import part
from triptych.runtime.comm import Communicator
from triptych.runtime.expert.experts import experts_of
from triptych.runtime.tensor.bias import OneBiasLinear
from triptych.runtime.tensor.functions import enter_region, leave_region
from triptych.runtime.tensor.linear import Linear, are_joined, product
from triptych.runtime.tensor.norms import split_head_norms


class RowParallelLinear(Linear):
    """y = sum over ranks of x_i W_i^T, plus the bias once; x_i is this rank's part of the input."""

    def __init__(
        self,
        linear: Linear,
        comm: Communicator,
        sequence_parallel: bool,
        other: UnsummedLinear | None = None,
    ) -> None:
        super().__init__(linear, linear.deferral)
        self._comm = comm
        self._sequence_parallel = sequence_parallel
        self._other = [] if other is None else [other]  # a list: not one of its submodules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, part of the input width] to [B, S or s, H]; the other's sum is in it."""
        y = product(x, self)
        for other in self._other:
            y = y + other.take()
        y = leave_region(y, self._comm, self._sequence_parallel)
        return y if self.bias is None else y + self.bias


class UnsummedLinear(Linear):
    """The first of two row-parallel linears of one region: returns its bias, or zero, alone.

    Its partial sum waits for the second, whose output the layer adds to this one's.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear, linear.deferral)
        self._partial: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, part of the input width] to a tensor that broadcasts to [B, S or s, H]."""
        self._partial = [product(x, self)]
        return x.new_zeros(()) if self.bias is None else self.bias

    def take(self) -> torch.Tensor:
        """The partial sum [B, S, H] of the last call."""
        return self._partial.pop()


class TableSink(Protocol):
    """Where a table's gradient accumulates."""

    def add_rows(self, grad_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
        """Adds a row's gradient for each id."""

    def arrive(self) -> None:
        """Notes that this micro-batch has given all it has to give."""


class VocabularyParallelEmbedding(nn.Module):
    """Looks up this rank's rows, zero elsewhere, and sums over the ranks.

    Every row learns, the padding token's too: padding is known by length, not by id. `scale`
    multiplies what is found, rounded to the weight's type as the library does.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        rows: tuple[int, int],
        comm: Communicator,
        sequence_parallel: bool,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.weight: torch.Tensor = embedding.weight
        self.sink: TableSink | None = None
        self._scale = scale
        self._rows = rows
        self._comm = comm
        self._sequence_parallel = sequence_parallel

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Token ids to [B, S or s, H]."""
        found = self._look_up(ids_BS)
        if self._scale is None:
            return found
        return found * torch.tensor(self._scale).to(found.dtype)

    def _look_up(self, ids_BS: torch.Tensor) -> torch.Tensor:
        if self._comm.size == 1:
            return self._rows_of(ids_BS)
        start, stop = self._rows
        elsewhere_BS = (ids_BS < start) | (ids_BS >= stop)
        local_BS = torch.where(elsewhere_BS, 0, ids_BS - start)
        found = self._rows_of(local_BS).masked_fill(elsewhere_BS[..., None], 0.0)
        return leave_region(found, self._comm, self._sequence_parallel)

    def _rows_of(self, ids_BS: torch.Tensor) -> torch.Tensor:
        if self.sink is None or not torch.is_grad_enabled():
            return functional.embedding(ids_BS, self.weight)
        found: torch.Tensor = _Rows.apply(ids_BS, self.weight, self.sink)  # type: ignore[no-untyped-call]
        return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids_BS: torch.Tensor, weight: torch.Tensor, sink: TableSink
    ) -> torch.Tensor:
        ctx.save_for_backward(ids_BS)
        ctx.sink = sink
        return functional.embedding(ids_BS, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (ids_BS,) = ctx.saved_tensors
        sink: TableSink = ctx.sink
        sink.add_rows(grads[0].flatten(0, -2), ids_BS.flatten())
        sink.arrive()
        return None, None, None


class PositionTable(nn.Module):
    """Looks up learned positions: those of this rank's part of the sequence."""

    def __init__(self, table: nn.Embedding, num_parts: int, part_index: int) -> None:
        super().__init__()
        self.weight = table.weight
        self._num_parts, self._part_index = num_parts, part_index

    def forward(self, positions_1S: torch.Tensor) -> torch.Tensor:
        """Positions of the whole sequence to [1, s, H]."""
        local_1s = positions_1S.chunk(self._num_parts, dim=1)[self._part_index]
        return functional.embedding(local_1s, self.weight)


def shard_layer(
    layer: nn.Module, family: Family, comm: Communicator, sequence_parallel: bool
) -> None:
    """Gives one decoder layer its region entries and exits. Parameters are cut elsewhere."""

    def leave(_: nn.Module, __: Any, y: Any) -> Any:
        if isinstance(y, tuple):  # what a router says stands behind it
            return (leave_region(y[0], comm, sequence_parallel), *y[1:])
        return leave_region(y, comm, sequence_parallel)

    if family.joint_norm is not None:
        _shard_joint_region(layer, family, comm, sequence_parallel)
        return
    for name, row in family.regions.items():
        region = layer.get_submodule(name)
        has_experts = name == family.experts and experts_of(layer, family) is not None
        alone = not has_experts and _is_read_once(region, row)
        entry = _entry(comm, sequence_parallel, alone)
        region.register_forward_pre_hook(entry, with_kwargs=True)
        if has_experts:
            region.register_forward_hook(leave)
            _add_biases_once(region, comm)
            continue
        linear = region.get_submodule(row)
        assert isinstance(linear, Linear)
        region.add_module(row, RowParallelLinear(linear, comm, sequence_parallel))


def _is_read_once(region: nn.Module, row: str) -> bool:
    """True if all linears in front of a region's last one are made together."""
    last = region.get_submodule(row)
    linears = [m for m in region.modules() if isinstance(m, Linear) and m is not last]
    return are_joined(linears)


def _entry(comm: Communicator, sequence_parallel: bool, alone: bool) -> Callable[..., Any]:
    """What stands before a region, whose linears `alone` read its input or not."""
    enter = partial(
        enter_region, comm=comm, sequence_parallel=sequence_parallel, for_products=alone
    )

    def entry(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}

    return entry


def _add_biases_once(region: nn.Module, comm: Communicator) -> None:
    """Lets one rank alone add the output biases of experts, whose partial sums are left later."""
    for name, module in list(region.named_modules()):
        if name.endswith("down_proj") and isinstance(module, Linear) and module.bias is not None:
            region.set_submodule(name, OneBiasLinear(module, is_first=comm.index == 0))


def _shard_joint_region(
    layer: nn.Module, family: Family, comm: Communicator, sequence_parallel: bool
) -> None:
    """Both branches: entered behind the norm that they share, left by the second."""
    assert family.joint_norm is not None
    norm = layer.get_submodule(family.joint_norm)
    norm.register_forward_hook(lambda _, __, x: enter_region(x, comm, sequence_parallel))
    (first, first_row), (second, second_row) = (
        (layer.get_submodule(name), row) for name, row in family.regions.items()
    )
    ours, theirs = first.get_submodule(first_row), second.get_submodule(second_row)
    assert isinstance(ours, Linear) and isinstance(theirs, Linear)
    unsummed = UnsummedLinear(ours)
    first.add_module(first_row, unsummed)
    second.add_module(second_row, RowParallelLinear(theirs, comm, sequence_parallel, unsummed))


def shard_embedding(
    trunk: nn.Module, model: Model, comm: Communicator, sequence_parallel: bool
) -> None:
    """Replaces the input embedding of a first stage, and its table of positions."""
    family = family_of(model.family)
    embedding = trunk.get_submodule(family.embedding)
    assert isinstance(embedding, nn.Embedding)
    scale: Any = embedding.scalar_embed_scale if family.scaled_embedding else None
    rows = part(model.vocab, comm.size, comm.index)
    trunk.add_module(
        family.embedding,
        VocabularyParallelEmbedding(embedding, rows, comm, sequence_parallel, scale),
    )
    if family.positions is not None and sequence_parallel:
        table = trunk.get_submodule(family.positions)
        assert isinstance(table, nn.Embedding)
        trunk.add_module(family.positions, PositionTable(table, comm.size, comm.index))


def set_heads(layer: nn.Module, model: Model, comm: Communicator) -> None:
    """Tells an attention module of the library about this rank's heads, in each family's words."""
    family, attention = family_of(model.family), model.blocks[0].attention
    kv = _count(kv_head_range(attention, comm.size, comm.index))
    query = _count(query_head_range(attention, comm.size, comm.index))
    module: Any = layer.get_submodule(family.attention)
    module.config = copy.copy(module.config)  # the library's one config serves all modules
    module.config.num_attention_heads = query
    module.num_key_value_heads = kv
    module.num_key_value_groups = query // kv
    module.split_size = query * attention.head_dim
    if family.wide_head_norm:
        split_head_norms(module, attention, comm)


def _count(held: tuple[int, int]) -> int:
    return held[1] - held[0]
