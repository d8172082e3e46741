"""Our names of dtypes and torch's."""

from __future__ import annotations

import torch

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, ours if we have one."""
    return next((n for n, d in _DTYPES.items() if d == dtype), str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of `fp64`, `fp32`, `bf16` or `fp16`."""
    return _DTYPES[name]
