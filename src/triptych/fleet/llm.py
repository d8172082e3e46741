"""LLMs on groups of devices, priced by the serving cost model and simulated as they are served.

What weights and work space leave of a device's memory is for keys and values; the models of a group
share it (`fleet.shared`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.layout import layout
from triptych.cost.serving.memory import Memory, memory
from triptych.cost.serving.step import Stepper
from triptych.errors import InputError, Problem
from triptych.fleet.models import Shape
from triptych.fleet.room import BLOCK
from triptych.fleet.shared import Seat, SharedFleet, SharedGroup
from triptych.fleet.terms import Terms
from triptych.model.model import Model
from triptych.plan.plan import even_split
from triptych.plan.serving import ServingPlan
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice
from triptych.simulate.priced import PricedSteps
from triptych.simulate.replica import StepShape
from triptych.simulate.trace import Trace
from triptych.units import GIB

CACHE_SHARE = 0.3  # of a device's memory that weights leave to keys and values
BATCH, CHUNK = 256, 2048


@dataclass(frozen=True, slots=True)
class LlmGroup:
    """Devices of one shape and the numbers of the LLMs on them."""

    shape: Shape
    models: tuple[int, ...] = ()


class LlmFleet:
    """LLMs, each with its terms, and the devices that shall serve them.

    Args:
        models: in the order of the numbers that traces use.
        terms: of each.
        cluster: the devices.
        engine: that steps are priced for.
        contexts: longest prompt and answer of each; None: what the model can take.

    """

    def __init__(
        self,
        models: Sequence[Model],
        terms: Sequence[Terms],
        cluster: Cluster,
        engine: Engine = TRIPTYCH,
        contexts: Sequence[int] | None = None,
    ) -> None:
        self.models, self.terms = models, terms
        self.cluster, self.engine = cluster, engine
        self.contexts = contexts or [model.max_position for model in models]
        self._steps: dict[tuple[str, Shape], PricedSteps] = {}

    def with_objectives(self, factor: float) -> LlmFleet:
        """The same with all objectives multiplied; what has been priced is known to both."""
        other = copy.copy(self)
        other.terms = [terms.scaled(factor) for terms in self.terms]
        return other

    def on(self, cluster: Cluster) -> LlmFleet:
        """The same models on another cluster."""
        return LlmFleet(self.models, self.terms, cluster, self.engine, self.contexts)

    def dealt(self, shape: Shape, loads: Sequence[float]) -> list[LlmGroup]:
        """Groups of one shape; models dealt by load, rounds of replicas while there is room.

        The model with the most load for each of its replicas comes first, those without any before
        all others, and goes to the group with the least load that has room for it.
        """
        groups = [LlmGroup(shape) for _ in range(self.cluster.num_devices // shape.devices)]
        replicas = [0] * len(self.models)

        def urgency(model: int) -> tuple[bool, float]:
            return not replicas[model], loads[model] / max(1, replicas[model])

        while True:
            for model in sorted(range(len(self.models)), key=urgency, reverse=True):
                fitting = [i for i, group in enumerate(groups) if self._takes(group, model)]
                if fitting:
                    break
            else:
                return groups
            held = [sum(loads[m] / replicas[m] for m in groups[i].models) for i in fitting]
            index = fitting[int(np.argmin(held))]
            groups[index] = LlmGroup(shape, (*groups[index].models, model))
            replicas[model] += 1

    def served(
        self, groups: Sequence[LlmGroup], trace: Trace, *, refuses_late: bool = True
    ) -> NDArray[np.bool_]:
        """Of each request, whether it was answered within all objectives of its model."""
        fleet = self.simulated(groups, refuses_late=refuses_late)
        return np.array([fleet.met(record) for record in fleet.run(trace)], dtype=np.bool_)

    def simulated(self, groups: Sequence[LlmGroup], *, refuses_late: bool = True) -> SharedFleet:
        """The groups with nothing on them."""
        shared = [self.shared(group) for group in groups]
        return SharedFleet(shared, dict(enumerate(self.terms)), refuses_late=refuses_late)

    def shared(self, group: LlmGroup) -> SharedGroup:
        """A group as it is simulated. Raises InputError, with the bytes, if it has no room."""
        whole = [self._memory(m, group.shape) for m in group.models]
        room = _cache_bytes(whole)
        if group.models and room <= 0:
            names = ", ".join(self.models[m].name for m in group.models)
            held = max(sum(m.stages[i].weights_bytes for m in whole) for i in _stages(whole))
            limit = whole[0].limit_bytes
            raise InputError(
                Problem(
                    f"{names} on a group of {group.shape}: {held:.0f} bytes "
                    f"({held / GIB:.2f} GiB) of weights on a device",
                    f"less than {limit:.0f} bytes ({limit / GIB:.2f} GiB), with room for keys and "
                    "values",
                    "fewer models in the group, or a larger shape",
                )
            )
        seats = []
        for model, own in zip(group.models, whole, strict=True):
            block_bytes = max(stage.sequence_bytes(BLOCK) for stage in own.stages)
            useful = BATCH * -(-self.contexts[model] // BLOCK)
            limits = Limits(
                num_blocks=max(1, min(useful, int(room / block_bytes))),
                block_size=BLOCK,
                model_context=self.contexts[model],
                max_running=BATCH,
                token_budget=CHUNK,
                stages=group.shape.pipeline,
                prefix_reuse=False,
            )
            cost = self._priced(model, group.shape)
            price = price_of(cost)
            seats.append(Seat(model=model, cost=cost, limits=limits, block_bytes=int(block_bytes),
                              price=price))  # fmt: skip
        return SharedGroup(seats=tuple(seats), cache_bytes=int(room) if len(seats) > 1 else None)

    def _takes(self, group: LlmGroup, model: int) -> bool:
        if model in group.models:
            return False
        parts = [self._memory(m, group.shape) for m in (*group.models, model)]
        most = max(sum(m.stages[i].weights_bytes for m in parts) for i in _stages(parts))
        return bool(most <= (1 - CACHE_SHARE) * parts[0].limit_bytes)

    def _plan(self, model: int, shape: Shape) -> ServingPlan:
        layers = even_split(self.models[model].num_layers, shape.pipeline)
        return ServingPlan(layers=layers, tensor=shape.tensor, replicas=1, batch=BATCH, chunk=CHUNK)

    def _memory(self, model: int, shape: Shape) -> Memory:
        plan = self._plan(model, shape)
        return memory(layout(self.models[model], plan), self.cluster, plan, self.engine)

    def _priced(self, model: int, shape: Shape) -> PricedSteps:
        """Shared by all models of one kind: what has been priced is known to all."""
        key = (self.models[model].name, shape)
        if key not in self._steps:
            plan = self._plan(model, shape)
            stepper = Stepper(layout(self.models[model], plan), self.cluster, plan, self.engine)
            self._steps[key] = PricedSteps(stepper)
        return self._steps[key]


def price_of(cost: PricedSteps, context: int = 512) -> StepPrice:
    """Three steps that are priced, as the router takes them at first."""
    one = sum(cost(StepShape(1, context, (), 1)))
    many = sum(cost(StepShape(33, 33 * context, (), 33)))
    full = sum(cost(StepShape(1, context, ((CHUNK, 0),), 2)))
    decode_s = max(0.0, (many - one) / 32)
    return StepPrice(max(0.0, one - decode_s), decode_s, max(0.0, (full - one) / CHUNK))


def _stages(whole: Sequence[Memory]) -> range:
    return range(len(whole[0].stages))


def _cache_bytes(whole: Sequence[Memory]) -> float:
    """What weights and one work space leave of the fullest device of a group."""
    if not whole:
        return 0.0
    found = []
    for index in _stages(whole):
        same = [m.stages[index] for m in whole]
        work = max(stage.workspace_bytes for stage in same)
        found.append(whole[0].limit_bytes - sum(s.weights_bytes for s in same) - work)
    return min(found)
