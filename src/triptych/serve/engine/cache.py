"""The pool of key/value blocks of one stage's layers, and attention over block tables.

Both kinds of attention read the same caches: keys [blocks, kv heads, key dim, block size], values
[blocks, kv heads, block size, value dim padded to 8]. Shapes: R rows (tokens) of a step, H query
heads, K key/value heads, D key dim, E value dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from triptych.runtime.attention import attend_to_cache
from triptych.runtime.context.block import Scores
from triptych.serve.core.step import Copy
from triptych.serve.core.tables import Rows, Tables
from triptych.serve.engine.native import bind


class Heads(NamedTuple):
    """What one layer keeps of a token on this rank."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def padded_dim(self) -> int:
        """Elements that a value takes."""
        return -(-self.value_dim // 8) * 8

    @property
    def elements(self) -> int:
        """Elements of a token."""
        return self.kv_heads * (self.key_dim + self.padded_dim)


class LayerCache:
    """Keys and values of one layer."""

    def __init__(
        self,
        heads: Heads,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.heads = heads
        shape = (num_blocks, heads.kv_heads)
        self.keys = _zeros((*shape, heads.key_dim, block_size), dtype, device)
        self.values = _zeros((*shape, block_size, heads.padded_dim), dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU, pages of the system that cost memory when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


class Pool:
    """The caches of a stage's layers; `layers` by their place in the model."""

    def __init__(
        self,
        heads: Mapping[int, Heads],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: bool = True,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.layers = {
            index: LayerCache(each, num_blocks, block_size, dtype, device)
            for index, each in heads.items()
        }
        self._is_native = (
            kernels
            and dtype == torch.float32
            and device.type == "cpu"
            and block_size in bind.BLOCK_SIZES
            and all(each.value_dim <= bind.MOST_VALUE_DIM for each in heads.values())
            and bind.available()
        )
        self._device = device

    def copy(self, copies: tuple[Copy, ...]) -> None:
        """Copies blocks, before the step that asks for it writes anything."""
        if not copies:
            return
        sources, targets = (
            torch.tensor([getattr(c, name) for c in copies], device=self._device)
            for name in ("source", "target")
        )
        for layer in self.layers.values():
            for cache in (layer.keys, layer.values):
                cache[targets] = cache[sources]

    def attend(
        self,
        index: int,
        q_RHD: torch.Tensor,
        k_RKD: torch.Tensor,
        v_RKE: torch.Tensor,
        scores: Scores,
        rows: Rows,
        tables: Tables,
    ) -> torch.Tensor:
        """Keeps the rows' keys and values and attends: [R, H, E]."""
        layer = self.layers[index]
        if not self._is_native:
            self._keep(layer, k_RKD, v_RKE, rows)
            return self._attend(layer, q_RHD, scores, rows, tables)
        bind.keep(k_RKD, v_RKE, layer.keys, layer.values, rows.cache, self.block_size)
        return bind.attend(
            q_RHD,
            layer.keys,
            layer.values,
            layer.heads.value_dim,
            bind.Placed(rows.cache, rows.starts, rows.slots, rows.lengths, tables.blocks),
            self.block_size,
            scale=scores.scale,
            window=scores.window or 0,
            chunk=scores.chunk or 0,
            softcap=scores.softcap or 0.0,
            sinks=scores.sinks,
        )

    # ---- in torch -----------------------------------------------------------------------------

    def _keep(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> None:
        at = torch.from_numpy(rows.cache).to(self._device, torch.int64)
        block, offset = at // self.block_size, at % self.block_size
        layer.keys[block, :, :, offset] = k
        layer.values[block, :, offset, : layer.heads.value_dim] = v

    def _attend(
        self, layer: LayerCache, q: torch.Tensor, scores: Scores, rows: Rows, tables: Tables
    ) -> torch.Tensor:
        """One sequence after the other; its blocks are gathered."""
        found = []
        for number, slot in enumerate(rows.slots.tolist()):
            start, stop = rows.starts[number], rows.starts[number + 1]
            length = int(rows.lengths[number])
            table = tables.blocks[slot, : -(-length // self.block_size)]
            blocks = torch.from_numpy(table).to(self._device, torch.int64)
            keys = layer.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
            values = layer.values[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            seen = attend_to_cache(
                q[start:stop].transpose(0, 1)[None],
                keys[None],
                values[None, ..., : layer.heads.value_dim],
                scores,
            )
            found.append(seen[0].transpose(0, 1))
        return torch.cat(found)
