"""LLMs on groups of devices: continuous batching and keys and values of several on one group.

Each model of a group has a scheduler and a pool of blocks of its own; they take turns on the stages
of the group, step by step. What weights and work space leave of the memory is parted evenly. A
request goes to the group that holds its model and has the fewest requests, waiting or running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.cluster.cluster import Cluster
from triptych.cost.serving.engine import TRIPTYCH, Engine
from triptych.cost.serving.layout import layout
from triptych.cost.serving.memory import Memory, memory
from triptych.cost.serving.step import Stepper
from triptych.fleet.models import Shape
from triptych.model.model import Model
from triptych.plan.serving import ServingPlan
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import LatencyClass, Request
from triptych.simulate.metrics import meets
from triptych.simulate.priced import PricedSteps
from triptych.simulate.replica import Replica
from triptych.simulate.run import simulate
from triptych.simulate.trace import Trace

Floats = NDArray[np.float64]
CACHE_SHARE = 0.3  # of a device's memory that weights leave to keys and values
BLOCK = 16
BATCH, CHUNK = 256, 2048


@dataclass(frozen=True, slots=True)
class LlmGroup:
    """Devices of one shape and the numbers of the LLMs on them."""

    shape: Shape
    models: tuple[int, ...] = ()


class LlmFleet:
    """LLMs, each with its objectives, and the devices that shall serve them."""

    def __init__(
        self,
        models: Sequence[Model],
        classes: Sequence[LatencyClass],
        cluster: Cluster,
        engine: Engine = TRIPTYCH,
    ) -> None:
        self.models, self.classes = models, classes
        self.cluster, self.engine = cluster, engine
        self._steps: dict[tuple[str, Shape], PricedSteps] = {}

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

    def served(self, groups: Sequence[LlmGroup], trace: Trace) -> NDArray[np.bool_]:
        """Of each request, whether it was answered within both objectives of its model."""
        replicas: list[Replica] = []
        places: dict[int, list[tuple[int, slice]]] = {}
        for group in groups:
            own = slice(len(replicas), len(replicas) + len(group.models))
            for index, model in enumerate(group.models, start=own.start):
                places.setdefault(model, []).append((index, own))
            replicas += self.replicas(group)
        is_held = np.isin(trace.model, list(places))
        model_of = trace.model[is_held].tolist()

        def to_the_least_loaded(request: Request, replicas: Sequence[Replica]) -> int:
            held = places[model_of[request.id]]
            return min((_load(replicas[own]), index) for index, own in held)[1]

        classes = [self.classes[model] for model in model_of]
        records = simulate(
            trace.only(is_held), replicas, to_the_least_loaded, lambda index: classes[index].name
        )
        hits = np.zeros(len(trace), np.bool_)
        hits[is_held] = [meets(r, latency) for r, latency in zip(records, classes, strict=True)]
        return hits

    def replicas(self, group: LlmGroup) -> list[Replica]:
        """One of each model, all on the same line of stages."""
        line = [0.0] * group.shape.pipeline
        whole = [self._memory(m, group.shape) for m in group.models]
        policy = Policy(classes=tuple({c.name: c for c in self.classes}.values()))
        return [
            Replica(
                Limits(
                    num_blocks=_blocks(whole, own),
                    block_size=BLOCK,
                    model_context=self.models[model].max_position,
                    max_running=BATCH,
                    token_budget=CHUNK,
                    stages=group.shape.pipeline,
                    prefix_reuse=False,
                ),
                self._priced(model, group.shape),
                policy,
                line,
            )
            for model, own in zip(group.models, whole, strict=True)
        ]

    def _takes(self, group: LlmGroup, model: int) -> bool:
        if model in group.models:
            return False
        parts = [self._memory(m, group.shape) for m in (*group.models, model)]
        stages = zip(*(part.stages for part in parts), strict=True)
        most = max(sum(stage.weights_bytes for stage in same) for same in stages)
        return bool(most <= (1 - CACHE_SHARE) * parts[0].limit_bytes)

    def _plan(self, model: int, shape: Shape) -> ServingPlan:
        per, rest = divmod(self.models[model].num_layers, shape.pipeline)
        layers = tuple(per + (stage < rest) for stage in range(shape.pipeline))
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


def _load(replicas: Sequence[Replica]) -> int:
    loads = [replica.scheduler.load for replica in replicas]
    return sum(load.num_waiting + load.num_running for load in loads)


def _blocks(whole: Sequence[Memory], own: Memory) -> int:
    """Blocks of one of the models: its even part of what weights and one work space leave."""
    found = []
    for same, stage in zip(zip(*(m.stages for m in whole), strict=True), own.stages, strict=True):
        weights = sum(each.weights_bytes for each in same)
        work = max(each.workspace_bytes for each in same)
        free = (own.limit_bytes - weights - work) / len(whole)
        found.append(int(free / stage.sequence_bytes(BLOCK)))
    return min(found)
