"""A layer as a graph of operators with strategies on a mesh, priced by the cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from triptych.cost.kernels.collectives import Group
from triptych.cost.memory import kept_bytes
from triptych.cost.operators import Seconds, operator_seconds
from triptych.cost.pricer import Pricer
from triptych.cost.setting import Setting
from triptych.cost.shard import LocalOperator, localize
from triptych.cost.sharded import OVERLAP as SHARD_OVERLAP
from triptych.cost.site import Site
from triptych.cost.software import Footprint
from triptych.cost.storage import Storage
from triptych.cost.sync import OVERLAP
from triptych.model.model import Block, Experts
from triptych.model.operator import Operator
from triptych.model.operators import block_operators
from triptych.plan.nearby import splits_heads
from triptych.search.intra.convert import conversion_s
from triptych.search.intra.ilp import Array, Edge, Graph
from triptych.search.intra.modes import ENTRY, Mode, flows, modes, output_width

Strategy = tuple[Mode, ...]
"""What each axis of the mesh does to an operator."""


class Parts(NamedTuple):
    """Over how many ranks each part of an operator's work is divided."""

    rows: int
    positions: int
    features: int
    experts: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A kind of layer on a mesh whose last axis has neighbouring ranks.

    `rows` are the sequences of a micro-batch over the whole mesh; `setting` says the rest of what
    a plan decides. Resident bytes are of one layer: state as `storage` divides it over the ranks
    that see other tokens, and `in_flight` micro-batches of what is kept for the backward.
    """

    pricer: Pricer
    block: Block
    axes: tuple[int, ...]
    rows: int
    num_microbatches: int
    setting: Setting
    storage: Storage
    in_flight: int = 1

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """The layer's input and its operators, in the order of the forward."""
        return (ENTRY, *block_operators(self.pricer.model, self.block))

    @property
    def _flows(self) -> list[tuple[int, int]]:
        captured = self.block.captured
        return list(captured.flows) if captured else flows(self.operators)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The ranks along each axis."""
        strides = [prod(self.axes[i + 1 :]) for i in range(len(self.axes))]
        return tuple(map(self.pricer.group, self.axes, strides))

    @cached_property
    def strategies(self) -> tuple[tuple[Strategy, ...], ...]:
        """The legal strategies of each operator."""
        return tuple(tuple(self._legal(op)) for op in self.operators)

    def graph(self, limit_bytes: float = float("inf")) -> Graph:
        """The integer programme of the layer, for so many bytes."""
        pairs = list(zip(self.operators, self.strategies, strict=True))
        priced = [[self._price(op, strategy) for strategy in found] for op, found in pairs]
        return Graph(
            seconds=[np.array([cost[0] for cost in costs]) for costs in priced],
            sizes=[np.array([cost[1] for cost in costs]) for costs in priced],
            edges=[Edge(source=a, target=b, seconds=self._edge(a, b)) for a, b in self._flows],
            limit_bytes=limit_bytes,
        )

    # --- strategies ------------------------------------------------------------------------------

    @property
    def _forwards(self) -> int:
        return 2 if self.setting.recompute == "full" else 1

    def _legal(self, op: Operator) -> list[Strategy]:
        every = product(modes(op), repeat=len(self.axes))
        return [strategy for strategy in every if self._is_legal(op, strategy)]

    def _is_legal(self, op: Operator, strategy: Strategy) -> bool:
        parts = self._parts(strategy)
        splits = {mode.split for mode in strategy if mode.split}
        attention = self.block.attention
        return (
            len(splits) < 2
            and self.rows % parts.rows == 0
            and self.pricer.workload.sequence_length % parts.positions == 0
            and (parts.features == 1 or splits_heads(attention, parts.features))
            and (op.copies == 1 or op.copies % parts.experts == 0)
        )

    def _parts(self, strategy: Strategy) -> Parts:
        pairs = list(zip(self.axes, strategy, strict=True))
        return Parts(
            rows=prod(size for size, mode in pairs if mode.divides == "rows"),
            positions=prod(size for size, mode in pairs if mode.divides == "positions"),
            features=prod(size for size, mode in pairs if mode.split),
            experts=prod(size for size, mode in pairs if mode.reads == mode.writes == "E"),
        )

    # --- nodes -----------------------------------------------------------------------------------

    def _price(self, op: Operator, strategy: Strategy) -> tuple[float, float]:
        """Seconds of a micro-batch and resident bytes of an operator under a strategy."""
        parts = self._parts(strategy)
        setting = self._setting(parts)
        site = self.pricer.site(setting)
        if op is ENTRY:
            is_kept = self.setting.recompute == "full"
            return 0.0, is_kept * self.in_flight * site.activation_bytes(setting)
        split = next((mode.split for mode in strategy if mode.split), op.split)
        chosen = replace(op, split=split)
        local = localize(chosen, self.pricer.model, self.block, parts.features, parts.experts)
        own = operator_seconds(site, local, setting)
        held, shards = float(local.weight_elements), self._replicas(strategy)
        seconds = self._forwards * own.forward_s + own.backward_s
        seconds += self._exchange_s(site, strategy, setting)
        seconds += self._sync_s(held, shards, own) if held and shards.size > 1 else 0.0
        state = sum(kept_bytes(held, held / shards.size, self.storage, self._footprint))
        return seconds, state + self.in_flight * self._kept_bytes(site, local, setting)

    @property
    def _footprint(self) -> Footprint:
        return self.pricer.software.footprint

    def _kept_bytes(self, site: Site, local: LocalOperator, setting: Setting) -> float:
        if self.setting.recompute == "full":
            return 0.0
        elements = local.saved + local.sequence_saved
        return elements * site.tokens(setting) * site.rates.element_bytes

    def _setting(self, parts: Parts) -> Setting:
        return self.setting._replace(
            tensor=parts.features,
            context=parts.positions,
            expert=parts.experts,
            sequence_parallel=False,
            microbatch=self.rows // parts.rows,
        )

    def _exchange_s(self, site: Site, strategy: Strategy, setting: Setting) -> float:
        """Tokens to the experts of other ranks, or back: one all-to-all a pass."""
        pairs = zip(self.groups, strategy, strict=True)
        groups = [group for group, mode in pairs if mode.exchanges]
        if not groups or not isinstance(self.block.mlp, Experts):
            return 0.0
        size_bytes = site.activation_bytes(setting) * self.block.mlp.top_k
        exposed = (1.0 - site.software.hides_experts) * (self._forwards + 1)
        return exposed * sum(group.all_to_all_s(size_bytes) for group in groups)

    def _replicas(self, strategy: Strategy) -> Group:
        """The ranks that hold the same weights and see other tokens."""
        see_others = [
            mode.divides in ("rows", "positions") and mode.writes != "E" for mode in strategy
        ]
        axes = [i for i, others in enumerate(see_others) if others]
        size = prod(self.axes[i] for i in axes)
        stride = prod(self.axes[axes[-1] + 1 :]) if axes else 1
        return self.pricer.group(size, stride)

    def _sync_s(self, held: float, shards: Group, own: Seconds) -> float:
        """Exposed seconds of gradients, and under ZeRO-3 of weights, a micro-batch."""
        storage, is_cpu = self.storage, self.pricer.device.kind == "cpu"
        hides = self.pricer.software.hides_gradients and not is_cpu
        size_bytes = held * storage.reduction_bytes
        if storage.zero < 3:
            whole_s = shards.all_reduce_s(size_bytes)
            hidden_s = OVERLAP * own.backward_s if hides else 0.0
            return max(0.0, whole_s - hidden_s) / self.num_microbatches
        gather_s = (self._forwards + 1) * shards.gather_s(held * storage.parameter_bytes)
        total_s = gather_s + shards.gather_s(size_bytes)
        hidden_s = 0.0 if is_cpu else SHARD_OVERLAP * (own.forward_s + own.backward_s)
        return total_s - min(hidden_s, self.pricer.software.hides_shards * total_s)

    # --- edges -----------------------------------------------------------------------------------

    def _edge(self, source: int, target: int) -> Array:
        """Seconds of every pair of strategies: of their letters, which few pairs differ in."""
        op, letters = self.operators[source], self.pricer.model.hidden
        width = float(letters) if op is ENTRY else output_width(op, letters)
        tokens = self.rows * self.pricer.workload.sequence_length
        size_bytes = tokens * width * self.pricer.rates(self.setting.dtype).element_bytes
        writes = ["".join(mode.writes for mode in s) for s in self.strategies[source]]
        reads = ["".join(mode.reads for mode in s) for s in self.strategies[target]]
        known = {
            (a, b): conversion_s(a, b, self.groups, size_bytes, self._forwards)
            for a in set(writes)
            for b in set(reads)
        }
        return np.array([[known[a, b] for b in reads] for a in writes])
