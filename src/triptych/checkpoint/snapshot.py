"""A copy of what a rank saves, in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from triptych.runtime.shard import Shard


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copied shards; they are whole once `wait` has returned."""

    shards: Sequence[Shard]
    wait: Callable[[], None]


class Snapshots:
    """Takes snapshots into the same buffers again and again: fresh pages cost more than copies.

    Only one snapshot is whole at a time: a new one overwrites the last.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        """Host memory that the buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, shards: Sequence[Shard]) -> Snapshot:
        """Copies of the shards that this rank saves.

        On CUDA the copies are queued behind the work so far, into pinned memory, and the host goes
        on: updates that are queued later cannot change them.
        """
        saved = [shard for shard in shards if shard.saved]
        live = [shard.tensor for shard in saved]
        if not _fits(self._buffers, live):
            self._buffers = [_host(tensor) for tensor in live]
        with torch.no_grad():
            for buffer, tensor in zip(self._buffers, live, strict=True):
                buffer.copy_(tensor, non_blocking=True)
        copies = [
            replace(shard, tensor=buffer)
            for shard, buffer in zip(saved, self._buffers, strict=True)
        ]
        return Snapshot(copies, _copied(live))


def _fits(buffers: Sequence[torch.Tensor], live: Sequence[torch.Tensor]) -> bool:
    return len(buffers) == len(live) and all(
        buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
        for buffer, tensor in zip(buffers, live, strict=True)
    )


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(live: Sequence[torch.Tensor]) -> Callable[[], None]:
    """What returns when the copies queued so far are there."""
    if not any(tensor.is_cuda for tensor in live):
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return lambda: event.synchronize()
