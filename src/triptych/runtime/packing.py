"""Parts of tensors that travel in one message: laid one after the other, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Parts = Sequence[tuple[int, tuple[slice, ...]]]
"""Rectangles: which tensor of a list, and its slices."""


def pack(tensors: Sequence[torch.Tensor], parts: Parts) -> torch.Tensor:
    """The parts as one flat tensor; one that is contiguous is not copied."""
    flat = [tensors[index][slices].reshape(-1) for index, slices in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def room(tensors: Sequence[torch.Tensor], parts: Parts) -> torch.Tensor:
    """Memory for a message with these parts."""
    elements = sum(tensors[index][slices].numel() for index, slices in parts)
    return tensors[0].new_empty(elements)


def unpack(
    message: torch.Tensor, tensors: Sequence[torch.Tensor], parts: Parts
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part's place with what arrived for it."""
    start = 0
    for index, slices in parts:
        place = tensors[index][slices]
        yield place, message[start : start + place.numel()].view(place.shape)
        start += place.numel()
