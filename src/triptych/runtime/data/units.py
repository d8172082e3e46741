"""ZeRO-3: units of parameters that are whole only while they are used.

A unit is a decoder layer, the embedding or the head; the final norm goes with the last layer. It is
gathered ahead of its forward and ahead of its backward, `prefetch` units early in the order of
execution, and released after each: at most 1 + prefetch units are whole at any time. Forward and
backward of several micro-batches may alternate as the schedule likes.

    forward    embedding | layer 0 | layer 1 | ... | last layer, norm | head
    backward                                         norm, last layer | ... | layer 1 | layer 0

The lookup's and the head's backward need no weights (the loss makes the head's gradients in the
forward), so those two are gathered once a micro-batch, not twice. Autograd keeps views of released
parameters; every one is read inside its own unit's backward, when the same values stand in the same
place again. Recomputation runs there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from triptych.model.model import Model
from triptych.plan.families import Family, family_of
from triptych.plan.plan import Plan
from triptych.runtime.build.stage import StageModule
from triptych.runtime.data.bucket import Bucket
from triptych.runtime.data.buckets import GradientBuckets
from triptych.runtime.data.slot import Slot

Key = int | str
"""A layer, or an end of the model."""

EMBEDDING, HEAD = "embedding", "head"

Unit = Sequence[Bucket]
"""The buckets that are gathered together."""


class _Part(NamedTuple):
    """A module of a stage and the unit that its parameters belong to."""

    key: Key
    module: nn.Module


def _parts(stage: StageModule, layers: range, family: Family) -> Iterator[_Part]:
    trunk = stage.causal_lm.get_submodule(family.trunk)
    if stage.is_first:
        for name in (family.embedding, family.positions):
            if name is not None:
                yield _Part(EMBEDDING, trunk.get_submodule(name))
    for layer in layers:
        yield _Part(layer, trunk.get_submodule(f"{family.layers}.{layer}"))
    if stage.is_last:
        yield _Part(layers[-1], trunk.get_submodule(family.norm))
        yield _Part(HEAD, stage.head)


def _layers(stage: StageModule, plan: Plan) -> range:
    bounds = plan.stages[stage.index]
    return range(bounds.start, bounds.stop)


def units_of(stages: Iterable[StageModule], plan: Plan, model: Model) -> Callable[[Slot], Key]:
    """The unit of each slot of these stages; that of its first use, if it has several."""
    family = family_of(model.family)
    keys = {
        id(module): part.key
        for stage in stages
        for part in _parts(stage, _layers(stage, plan), family)
        for module in part.module.modules()
    }
    return lambda slot: keys[id(slot.places[0][0])]


class Residence:
    """Which units are whole: the one in use and those ahead of it.

    What is whole and used next stays: the last layer from its forward to its backward if only the
    head comes between, the first layer from a backward to the next forward.
    """

    def __init__(self, buckets: GradientBuckets, plan: Plan, model: Model) -> None:
        self._buckets = buckets
        self._plan, self._family = plan, family_of(model.family)
        self._whole: list[Bucket] = []

    def attach(self, stages: Iterable[StageModule]) -> None:
        """Makes stages gather and release their units while they run."""
        for stage in stages:
            self._attach(stage)

    def _attach(self, stage: StageModule) -> None:
        layers = _layers(stage, self._plan)
        parts = list(_parts(stage, layers, self._family))
        units = {part.key: self._unit(parts, part.key) for part in parts}
        forward, backward = list(units.values()), [units[layer] for layer in reversed(layers)]
        places = {key: place for place, key in enumerate(units)}
        for part in parts:
            if part.key == HEAD:
                # The last layer is used next if its backward follows, and may stay till then.
                stage.before_head = partial(self._use, [units[HEAD], backward[0]], 0)
            elif part.module is _first(parts, part.key):
                self._watch_forward(part.module, forward, places[part.key])
            if part.key in layers and part.module is _first(parts[::-1], part.key):
                self._watch_backward(part.module, backward, layers[-1] - int(part.key))

    def _unit(self, parts: Sequence[_Part], key: Key) -> Unit:
        """The buckets with a parameter that these modules use: a tied one is in two units."""
        modules = {id(m) for part in parts if part.key == key for m in part.module.modules()}
        return [
            bucket
            for bucket in self._buckets.buckets
            if any(id(module) in modules for slot in bucket.slots for module, _ in slot.places)
        ]

    def _use(self, order: Sequence[Unit], place: int) -> None:
        """Makes a unit whole and starts those that follow it; releases all others."""
        now, *ahead = order[place : place + 1 + self._plan.prefetch]
        wanted = [bucket for unit in (now, *ahead) for bucket in unit]
        for bucket in self._whole:
            if bucket not in wanted:
                bucket.release()
        self._whole = wanted
        for bucket in now:
            bucket.start_gather()
        for bucket in now:
            bucket.finish_gather()
        for bucket in wanted[len(now) :]:
            bucket.start_gather()

    def _watch_forward(self, module: nn.Module, order: Sequence[Unit], place: int) -> None:
        def before(_: nn.Module, __: Any) -> None:
            self._use(order, place)

        module.register_forward_pre_hook(before)

    def _watch_backward(self, module: nn.Module, order: Sequence[Unit], place: int) -> None:
        def begin(_: torch.Tensor) -> None:
            self._use(order, place)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(begin)  # type: ignore[no-untyped-call]

        module.register_forward_hook(after)


def _first(parts: Sequence[_Part], key: Key) -> nn.Module:
    return next(part.module for part in parts if part.key == key)
