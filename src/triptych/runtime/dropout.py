"""Dropout whose masks follow from where they are used, not from a stream of random numbers.

A mask is drawn for a whole sequence from (seed, step, number of the sequence in the global batch,
place in the model), and a rank takes its part of it: all of a replicated activation, its rows under
sequence or context parallelism (of hidden states or of attention weights), its heads. So a mask is
the same when a layer is recomputed, on tensor ranks that hold the same values, and under every
layout; it differs between sequences, hence between data ranks and micro-batches, and from step to
step.

Shapes: B batch, S sequence, s = this rank's part of it, H hidden or heads, T keys.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.families import family_of
from triptych.plan.layout import query_head_range
from triptych.runtime.attention import WEIGHTS
from triptych.runtime.build.stage import StageModule
from triptych.runtime.comm import Communicator

_FUNCTIONAL = "residual_dropout"
"""Attribute of modules of the library that drop their output by a function (StarCoder 2)."""

_EMBEDDING = "embedding_dropout"
"""The same of a trunk, for what it embeds."""


_ALL = slice(None)


class Masks:
    """Draws masks for the micro-batch that runs now.

    Args:
        seed: of the run.
        num_parts, part_index: of the rows of a context rank, which sequence parallelism divides.
        context_size: ranks that hold parts of the same sequences.

    """

    def __init__(
        self,
        seed: int,
        *,
        num_parts: int,
        part_index: int,
        context_size: int,
        device: torch.device,
    ) -> None:
        self._seed = seed
        self._num_parts, self._part_index = num_parts, part_index
        self._context_size = context_size
        self._generator = torch.Generator(device)
        self.step = 0
        self._first = 0
        self._length = 0
        self._rows: torch.Tensor | slice = slice(None)

    def turn_to(self, first: int, length: int, places: torch.Tensor | None) -> None:
        """From now on masks are for sequences `first`, `first` + 1, ... of the global batch.

        `length` counts this context rank's tokens, at `places` of the row if they are not all.
        """
        self._first, self._length = first, length * self._context_size
        if places is not None:
            self._rows = places.chunk(self._num_parts)[self._part_index]
        else:
            size = length // self._num_parts
            self._rows = slice(self._part_index * size, (self._part_index + 1) * size)

    def hidden(self, place: str, rate: float, batch: int, width: int) -> torch.Tensor:
        """True for what stays of hidden states: [B, s, H], this rank's rows."""
        shape = (self._length, width)
        return torch.stack(
            [
                self._draw(f"{place} {b + self._first}", rate, shape)[self._rows]
                for b in range(batch)
            ]
        )

    def weights(
        self,
        place: str,
        rate: float,
        batch: int,
        heads: range,
        length: int,
        rows: torch.Tensor | slice = _ALL,
    ) -> torch.Tensor:
        """True for what stays of attention weights: [B, H, S, T], these heads and rows of T."""
        drawn = [
            self._draw(f"{place} {b + self._first} {head}", rate, (length, length))[rows]
            for b in range(batch)
            for head in heads
        ]
        return torch.stack(drawn).view(batch, len(heads), -1, length)

    def _draw(self, key: str, rate: float, shape: tuple[int, int]) -> torch.Tensor:
        text = f"{self._seed} {self.step} {key}".encode()
        digest = hashlib.blake2b(text, digest_size=4).digest()  # what a CPU generator takes
        self._generator.manual_seed(int.from_bytes(digest, "little"))
        kept = torch.empty(shape, dtype=torch.bool, device=self._generator.device)
        return kept.bernoulli_(1.0 - rate, generator=self._generator)


class Dropout(nn.Module):
    """Drops hidden states outside of tensor-parallel regions, in training."""

    def __init__(self, rate: float, place: str, masks: Masks) -> None:
        super().__init__()
        self.p = rate  # the library's name, which it reads
        self._place, self._masks = place, masks

    def forward(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """What stays, scaled so that its expectation is the input."""
        if not self.training or self.p == 0.0:
            return x_BsH
        mask = self._masks.hidden(self._place, self.p, x_BsH.shape[0], x_BsH.shape[-1])
        return keep(x_BsH, mask, self.p)


class WeightsDropout:
    """Drops attention weights of a module."""

    def __init__(self, place: str, heads: range, masks: Masks) -> None:
        self._place, self._heads, self._masks = place, heads, masks

    def __call__(
        self,
        weights_BHST: torch.Tensor,
        rate: float,
        rows: torch.Tensor | slice = _ALL,
        part: tuple[int, int] = (0, 1),
    ) -> torch.Tensor:
        """What stays of weights of these rows of the sequence, and of a part of the heads."""
        batch, num_heads, _, length = weights_BHST.shape
        index, size = part
        assert num_heads * size == len(self._heads)
        heads = self._heads[index * num_heads : (index + 1) * num_heads]
        mask = self._masks.weights(self._place, rate, batch, heads, length, rows)
        return keep(weights_BHST, mask, rate)


def keep(x: torch.Tensor, mask: torch.Tensor, rate: float) -> torch.Tensor:
    """x where the mask is True, scaled by 1 / (1 - rate); the backward needs the mask alone."""
    return x * mask * (1.0 / (1.0 - rate) if rate < 1.0 else 0.0)


def place_dropout(stage: StageModule, model: Model, tensor: Communicator, masks: Masks) -> None:
    """Puts ours in the place of every dropout of a stage's modules.

    What follows the embedding is the first stage's.
    """
    causal_lm, family = stage.causal_lm, family_of(model.family)
    heads = range(*query_head_range(model.blocks[0].attention, tensor.size, tensor.index))
    for name, module in list(causal_lm.named_modules()):
        parent, _, child = name.rpartition(".")
        if type(module) is nn.Dropout:
            is_own = stage.is_first or f".{family.layers}." in name
            dropout = Dropout(module.p if is_own else 0.0, name, masks)
            causal_lm.get_submodule(parent).add_module(child, dropout)
        if child == family.attention:
            setattr(module, WEIGHTS, WeightsDropout(name, heads, masks))
        if getattr(module, _FUNCTIONAL, 0.0):
            _drop_output(module, _FUNCTIONAL, module, name, masks)
    trunk = causal_lm.get_submodule(family.trunk)
    if getattr(trunk, _EMBEDDING, 0.0):
        embedding = trunk.get_submodule(family.embedding)
        _drop_output(trunk, _EMBEDDING, embedding, family.embedding, masks)


def _drop_output(
    owner: nn.Module, attribute: str, module: nn.Module, place: str, masks: Masks
) -> None:
    """Takes a rate from the library's module and applies it to the output of one."""
    dropout = Dropout(getattr(owner, attribute), place, masks)
    setattr(owner, attribute, 0.0)

    def drop(module: nn.Module, _: Any, output: Any) -> Any:
        dropout.training = module.training
        return (dropout(output[0]), *output[1:]) if isinstance(output, tuple) else dropout(output)

    module.register_forward_hook(drop)
