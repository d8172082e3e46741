"""Activation recomputation: a layer keeps its input only and runs again in the backward.

Chen et al. 2016; costs one more forward of the layer, its tensor-parallel collectives included.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_layer(layer: nn.Module) -> None:
    """Makes one decoder layer of the library recompute in training."""
    # There is no dropout (the zoo refuses it), so no random state has to be kept.
    run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    setattr(layer, "gradient_checkpointing", True)  # noqa: B010  (not a parameter of nn.Module)
    setattr(layer, "_gradient_checkpointing_func", run_again)  # noqa: B010
