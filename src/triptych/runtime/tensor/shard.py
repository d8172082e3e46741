"""Turns a stage's modules into their tensor-parallel form, in place, keeping parameter names.

A region is a child of a decoder layer that ends in a row-parallel linear: attention or MLP. Its
input is gathered (or copied) once for all column-parallel linears, its output reduced once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from triptych.model.model import Model
from triptych.plan.layout import kv_head_range, query_head_range
from triptych.plan.plan import part
from triptych.runtime.comm import Communicator
from triptych.runtime.tensor.functions import enter_region, leave_region
from triptych.runtime.tensor.linear import Linear, product

REGIONS = {"self_attn": "o_proj", "mlp": "down_proj"}
"""Region -> its row-parallel linear, in the layers of the allow-listed families."""


class RowParallelLinear(Linear):
    """y = sum over ranks of x_i W_i^T, plus the bias once; x_i is this rank's part of the input."""

    def __init__(self, linear: Linear, comm: Communicator, sequence_parallel: bool) -> None:
        super().__init__(linear, linear.deferral)
        self._comm = comm
        self._sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, part of the input width] to [B, S or s, H]."""
        y = leave_region(product(x, self), self._comm, self._sequence_parallel)
        return y if self.bias is None else y + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Looks up this rank's rows, zero elsewhere, and sums over the ranks.

    Every row learns, the padding token's too: padding is known by length, not by id.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        rows: tuple[int, int],
        comm: Communicator,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._rows = rows
        self._comm = comm
        self._sequence_parallel = sequence_parallel

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Token ids to [B, S or s, H]."""
        if self._comm.size == 1:
            return functional.embedding(ids_BS, self.weight)
        start, stop = self._rows
        elsewhere_BS = (ids_BS < start) | (ids_BS >= stop)
        local_BS = torch.where(elsewhere_BS, 0, ids_BS - start)
        found = functional.embedding(local_BS, self.weight)
        found = found.masked_fill(elsewhere_BS[..., None], 0.0)
        return leave_region(found, self._comm, self._sequence_parallel)


def shard_layer(layer: nn.Module, comm: Communicator, sequence_parallel: bool) -> None:
    """Gives one decoder layer its region entries and exits. Parameters are cut elsewhere."""

    def entry(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (enter_region(args[0], comm, sequence_parallel), *args[1:]), kwargs
        hidden = enter_region(kwargs["hidden_states"], comm, sequence_parallel)
        return args, {**kwargs, "hidden_states": hidden}

    for name, row in REGIONS.items():
        region = layer.get_submodule(name)
        region.register_forward_pre_hook(entry, with_kwargs=True)
        linear = region.get_submodule(row)
        assert isinstance(linear, Linear)
        setattr(region, row, RowParallelLinear(linear, comm, sequence_parallel))


def shard_embedding(
    base: nn.Module, model: Model, comm: Communicator, sequence_parallel: bool
) -> None:
    """Replaces the input embedding of a first stage."""
    embedding = base.get_submodule("embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    rows = part(model.vocab, comm.size, comm.index)
    base.add_module(
        "embed_tokens",
        VocabularyParallelEmbedding(embedding, rows, comm, sequence_parallel),
    )


def set_heads(layer: nn.Module, model: Model, comm: Communicator) -> None:
    """Sets the number of query heads that share a KV head on this rank."""
    attention = model.blocks[0].attention
    kv = kv_head_range(attention, comm.size, comm.index)
    query = query_head_range(attention, comm.size, comm.index)
    groups = (query[1] - query[0]) // (kv[1] - kv[0])
    setattr(layer.get_submodule("self_attn"), "num_key_value_groups", groups)  # noqa: B010
