"""Bytes that autograd keeps for a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_bytes(forward: Callable[[], object], parameters: Iterable[torch.Tensor]) -> int:
    """What a forward leaves for its backward, each storage once, `parameters` left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    size = sum(storage.nbytes() for storage in kept.values())
    del result  # until here it holds what was kept
    return size
