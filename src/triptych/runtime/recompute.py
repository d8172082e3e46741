"""Activation recomputation: what the backward can make again is not kept.

    full       a layer keeps its input only and runs again: one more forward of the layer, its
               tensor-parallel collectives included (Chen et al. 2016)
    selective  attention, from queries, keys and values to its output, keeps those inputs only: what
               is many times as large as them, but cheap to make (Korthikanti et al. 2022, sec. 5).
               A fused kernel does so by itself; then only its log-sum-exp is saved.

A backward that runs again sees the same numbers: dropout masks follow from where they are used,
not from a stream of random numbers, so no random state has to be kept.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

AGAIN = "runs_again"
"""Attribute of an attention module: what runs its core so that the backward can repeat it."""

_run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recompute_layer(layer: nn.Module) -> None:
    """Makes one decoder layer of the library recompute in training."""
    setattr(layer, "gradient_checkpointing", True)  # noqa: B010  (not a parameter of nn.Module)
    setattr(layer, "_gradient_checkpointing_func", _run_again)  # noqa: B010


def recompute_attention(attention: nn.Module) -> None:
    """Makes what lies between the projections of an attention module recompute."""
    setattr(attention, AGAIN, _run_again)
