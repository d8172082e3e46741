"""Memory of a serving rank: weights, work space, and what is left for keys and values."""

from __future__ import annotations

from typing import NamedTuple

from triptych.cluster.cluster import Cluster
from triptych.cost.kernels.rates import memory_limit_bytes
from triptych.cost.serving.engine import Engine
from triptych.cost.serving.layout import Layout, Stage
from triptych.plan.serving import ServingPlan
from triptych.units import DTYPE_BYTES

HIDDEN_COPIES = 8.0
"""Hidden states of a step that exist at once: residual, normed, reduced, gathered, narrow."""


class StageMemory(NamedTuple):
    """Bytes of the slowest rank of a stage; `free_bytes` can be negative."""

    weights_bytes: float
    workspace_bytes: float
    free_bytes: float  # for keys and values
    token_bytes: float  # of a token without windows
    windowed: tuple[tuple[float, int], ...]  # bytes of a token up to a window

    def sequence_bytes(self, tokens: float) -> float:
        """Keys and values of one sequence."""
        windowed = sum(size * min(tokens, window) for size, window in self.windowed)
        return self.token_bytes * tokens + windowed


class Memory(NamedTuple):
    """All stages of a replica."""

    stages: tuple[StageMemory, ...]
    limit_bytes: float

    @property
    def fits(self) -> bool:
        """True if weights and work space leave something."""
        return min(stage.free_bytes for stage in self.stages) > 0

    def sequences(self, tokens: float) -> float:
        """Sequences of some length whose keys and values fit at once."""
        if not self.fits:
            return 0.0
        return min(stage.free_bytes / stage.sequence_bytes(tokens) for stage in self.stages)

    @property
    def cache_bytes(self) -> float:
        """Bytes for keys and values of a device, the tightest stage's."""
        return max(0.0, min(stage.free_bytes for stage in self.stages))


def memory(layout: Layout, cluster: Cluster, plan: ServingPlan, engine: Engine) -> Memory:
    """What each stage holds; the engine takes its share of a device, or of what weights leave."""
    whole = memory_limit_bytes(cluster)
    limit = whole if engine.shares_rest else whole * engine.memory_share
    stages = []
    for stage in layout.stages:
        work = engine.workspace_bytes + _activations(layout, stage, plan.chunk)
        free = limit - stage.weights_bytes - work
        if engine.shares_rest and free > 0:
            free *= engine.memory_share
        stages.append(StageMemory(stage.weights_bytes, work, free, *_cache(stage, plan.cache)))
    return Memory(tuple(stages), limit)


def _activations(layout: Layout, stage: Stage, chunk: int) -> float:
    """Work space of the largest step: hidden states several times, and the widest output."""
    inner = max((layer.inner for layer in stage.layers), default=0.0)
    return chunk * 2.0 * (HIDDEN_COPIES * layout.hidden + 2.0 * inner)


def _cache(stage: Stage, dtype: str) -> tuple[float, tuple[tuple[float, int], ...]]:
    """Bytes of a token in layers that keep all, and by window in those that do not."""
    whole = 0.0
    windowed: dict[int, float] = {}
    for layer in stage.layers:
        size = layer.cache_elements * layer.count * DTYPE_BYTES[dtype]
        if layer.window:
            windowed[layer.window] = windowed.get(layer.window, 0.0) + size
        else:
            whole += size
    return whole, tuple((size, window) for window, size in windowed.items())
