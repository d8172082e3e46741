"""The kernels' structures and calls, as torch tensors see them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.serve.engine.native.build import library

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Tokens of a block that the attention kernel can take: whole panels of a segment of keys."""
MOST_VALUE_DIM = 1024

_POINTER, _WIDE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class _Product(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "packed bias residual out"), (_WIDE, "stride"), (_INT, "n k gated")
    )


class _Attention(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "q out keys values sinks tables starts slots lengths"),
        (_WIDE, "q_stride out_stride table_stride"),
        (_INT, "num_slots query_heads kv_heads key_dim value_dim block_size window chunk"),
        (_FLOAT, "scale softcap"),
    )


class Layer(ctypes.Structure):
    """A decoder layer: pointers to its weights and caches, its sizes."""

    _fields_ = _fields(
        (_POINTER, "input_norm qkv qkv_bias q_norm k_norm o o_bias"),
        (_POINTER, "mlp_norm gate_up gate_up_bias down down_bias keys values"),
        (_FLOAT, "eps scale"),
        (_INT, "hidden query_heads kv_heads head_dim rotary_dim width window adds_residual"),
    )


class Batch(ctypes.Structure):
    """The rows of a step, and room for what is between products."""

    _fields_ = _fields(
        (_POINTER, "normed qkv attended gated cosine sine cache tables starts slots lengths"),
        (_WIDE, "table_stride"),
        (_INT, "rows num_slots block_size threads"),
    )


class Placed(NamedTuple):
    """Where the rows of a step are: arrays as in `core.tables.Rows`, and all block tables."""

    cache: NDArray[np.int32]
    starts: NDArray[np.int32]
    slots: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tables: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [n, k] in panels, with its bias padded to them."""

    panels: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int


def available() -> bool:
    """Whether the kernels are there."""
    return library() is not None


def address(values: torch.Tensor | NDArray[Any] | None) -> int | None:
    """Where values lie in memory; None for none."""
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, torch.Tensor) else int(values.ctypes.data)


def pack(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> Packed:
    """Packs a weight; with a `gate` [n, k] the product is silu(gate x) x (weight x)."""
    found = library()
    assert found is not None
    weight = weight_NK.detach().float().contiguous()
    gates = None if gate is None else gate.detach().float().contiguous()
    n, k = weight.shape
    outputs = n if gates is None else 2 * n
    panels = torch.empty(-(-outputs // _panel()) * _panel() * k)
    found.triptych_pack(
        _POINTER(address(weight)),
        _POINTER(address(gates)),
        _INT(outputs),
        _INT(k),
        _POINTER(address(panels)),
    )
    bias = None if bias_N is None else _padded(bias_N.detach().float(), _panel())
    return Packed(panels, bias, outputs, k)


def gated_bias(gate_N: torch.Tensor, value_N: torch.Tensor) -> torch.Tensor:
    """The biases of gates and values as their panels have them: half and half."""
    half = _panel() // 2
    pairs = [_padded(b.detach().float(), half).view(-1, half) for b in (gate_N, value_N)]
    return torch.cat(pairs, dim=1).flatten()


@cache
def _panel() -> int:
    """Outputs of a panel of packed weights."""
    found = library()
    assert found is not None
    return int(found.triptych_panel())


def _padded(values_N: torch.Tensor, to: int) -> torch.Tensor:
    return torch.nn.functional.pad(values_N, (0, -len(values_N) % to)).contiguous()


def multiply(x_MK: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x W^T + b, [m, n]."""
    found = library()
    assert found is not None
    x_MK = x_MK.contiguous()
    out = x_MK.new_empty(len(x_MK), packed.n)
    product = _Product(
        address(packed.panels), address(packed.bias), None, address(out), packed.n, packed.n,
        packed.k, 0,
    )  # fmt: skip
    threads = torch.get_num_threads()
    found.triptych_multiply(
        ctypes.byref(product), _POINTER(address(x_MK)), _WIDE(packed.k), _WIDE(len(x_MK)), threads
    )
    return out


def normalise(x_MN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each row."""
    found = library()
    assert found is not None
    out = torch.empty_like(x_MN)
    rows, width = x_MN.shape
    found.triptych_norm(
        _POINTER(address(x_MN)), _POINTER(address(weight_N)), _FLOAT(eps), _WIDE(rows),
        _INT(width), _POINTER(address(out)), torch.get_num_threads(),
    )  # fmt: skip
    return out


def keep(
    key_RKD: torch.Tensor,
    value_RKE: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: NDArray[np.int32],
    block_size: int,
) -> None:
    """Writes keys and values of rows to their places in the caches."""
    found = library()
    assert found is not None
    key_RKD, value_RKE = key_RKD.contiguous(), value_RKE.contiguous()
    rows, heads, key_dim = key_RKD.shape
    value_dim = value_RKE.shape[2]
    found.triptych_keep(
        _POINTER(address(key_RKD)), _POINTER(address(value_RKE)), _POINTER(address(keys)),
        _POINTER(address(values)), _POINTER(address(cache)), _WIDE(rows), _WIDE(heads * key_dim),
        _WIDE(heads * value_dim), heads, key_dim, value_dim, block_size,
    )  # fmt: skip


def attend(
    q_RHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    value_dim: int,
    at: Placed,
    block_size: int,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows to the blocks of their slots, [rows, query heads, value dim]."""
    found = library()
    assert found is not None
    q_RHD = q_RHD.contiguous()
    rows, heads, key_dim = q_RHD.shape
    out = q_RHD.new_empty(rows, heads, value_dim)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    attention = _Attention(
        address(q_RHD), address(out), address(keys), address(values), address(sinks),
        address(at.tables), address(at.starts), address(at.slots), address(at.lengths),
        heads * key_dim, heads * value_dim, at.tables.shape[1],
        len(at.slots), heads, keys.shape[1], key_dim, value_dim, block_size, window, chunk,
        scale, softcap,
    )  # fmt: skip
    found.triptych_attend(ctypes.byref(attention), torch.get_num_threads())
    return out


def attention_half(layer: Layer, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
    """The attention branch of a layer for rows [m, hidden]; `out` may be `x`."""
    found = library()
    assert found is not None
    found.triptych_attention_half(
        ctypes.byref(layer), ctypes.byref(batch), _POINTER(x.data_ptr()), _POINTER(out.data_ptr())
    )


def mlp_half(layer: Layer, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
    """The MLP branch of a layer for rows [m, hidden]; `out` may be `x`."""
    found = library()
    assert found is not None
    found.triptych_mlp_half(
        ctypes.byref(layer), ctypes.byref(batch), _POINTER(x.data_ptr()), _POINTER(out.data_ptr())
    )
