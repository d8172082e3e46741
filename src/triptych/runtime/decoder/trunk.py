"""The layers of a stage one after the other, where all of them are of the plain kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from triptych.runtime.context.tiles import Documents


class Trunk:
    """What the library's trunk does without a cache: it makes masks besides, which we do not need.

    Args:
        layers: of the stage, in order.
        norm: behind the last one, if the stage has it.
        rotary: gives cosines and sines of positions.
        factor: of what the embedding gives, on the first stage.

    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        rotary: Callable[..., Any],
        factor: float,
    ) -> None:
        self._layers, self._norm, self._rotary, self._factor = layers, norm, rotary, factor

    def __call__(
        self, hidden_BsH: torch.Tensor, positions_BS: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        """[B, s, H] to the same."""
        if self._factor != 1.0:
            hidden_BsH = hidden_BsH * self._factor
        pair = self._rotary(hidden_BsH, positions_BS)
        for layer in self._layers:
            hidden_BsH = layer(
                hidden_BsH,
                position_embeddings=pair,
                documents=documents,
                positions=positions_BS,
            )
        return hidden_BsH if self._norm is None else self._norm(hidden_BsH)
