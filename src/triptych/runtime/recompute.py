"""Activation recomputation: what the backward can make again is not kept.

    full       a layer keeps its input only and runs again: one more forward of the layer, its
               tensor-parallel collectives included (Chen et al. 2016)
    selective  attention, from queries, keys and values to its output, keeps those inputs only: what
               is many times as large as them, but cheap to make (Korthikanti et al. 2022, sec. 5).
               A fused kernel does so by itself; then only its log-sum-exp is saved.

What a recomputed layer keeps may be divided over the tensor ranks, which without sequence
parallelism hold the same hidden states, and may wait in host memory (ZeRO-R: Rajbhandari et al.
2020, sec. 6.1).

A backward that runs again sees the same numbers: dropout masks follow from where they are used,
not from a stream of random numbers, so no random state has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from triptych.runtime.comm import Communicator, Count

AGAIN = "runs_again"
"""Attribute of an attention module: what runs its core so that the backward can repeat it."""

_run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class LayerInputs:
    """Runs recomputed layers and keeps their inputs.

    Args:
        divided_over: tensor ranks that hold the same inputs and keep a part each; None: all of it.
        host: counts what goes to host memory; None: inputs stay on the device.

    """

    def __init__(self, divided_over: Communicator | None, host: Count | None) -> None:
        self._comm, self._host = divided_over, host

    def run(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Runs a layer; its backward takes the input from where it is kept and runs it again.

        Cost: an all-gather of the input in the backward if it is divided, a copy to host memory
        and one back if it goes there.
        """
        if self._comm is None and self._host is None:
            return _run_again(forward, *args)
        # The checkpoint saves its inputs under these hooks, all else under its own.
        with torch.autograd.graph.saved_tensors_hooks(self._keep, self.restore):
            return _run_again(forward, *args)

    def keep(self, input_BSH: torch.Tensor) -> Kept | None:
        """A layer's input as it is kept; None: as any other tensor."""
        return None if self._comm is None and self._host is None else self._keep(input_BSH)

    def _keep(self, input_BSH: torch.Tensor) -> Kept:
        kept = input_BSH.detach()
        if self._comm is not None:
            size, index = -(-kept.numel() // self._comm.size), self._comm.index
            part = kept.flatten()[index * size : (index + 1) * size]
            kept = functional.pad(part, (0, size - part.numel())).clone()
        if self._host is not None:
            self._host.calls += 1
            self._host.bytes_sent += kept.nbytes
            home = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=kept.is_cuda)
            kept = home.copy_(kept, non_blocking=True)
        return Kept(kept, input_BSH.shape, input_BSH.device)

    def restore(self, kept: Kept) -> torch.Tensor:
        """What was kept, whole and on its device."""
        tensor = kept.tensor.to(kept.device, non_blocking=True)
        if self._comm is not None:
            tensor = self._comm.all_gather(tensor)[: kept.shape.numel()]
        return tensor.view(kept.shape)


class Kept(NamedTuple):
    """What stays of an input, and what it was."""

    tensor: torch.Tensor
    shape: torch.Size
    device: torch.device


def recompute_layer(layer: nn.Module, inputs: LayerInputs) -> None:
    """Makes one decoder layer of the library recompute in training."""
    setattr(layer, "gradient_checkpointing", True)  # noqa: B010  (not a parameter of nn.Module)
    setattr(layer, "_gradient_checkpointing_func", inputs.run)  # noqa: B010


def recompute_attention(attention: nn.Module) -> None:
    """Makes what lies between the projections of an attention module recompute."""
    setattr(attention, AGAIN, _run_again)
