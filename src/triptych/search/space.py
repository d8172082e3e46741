"""The plans that a search looks at: degrees that multiply to the cluster, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

from triptych.cluster.cluster import Cluster
from triptych.model.model import Block, Model
from triptych.plan.compiled import obstacle
from triptych.plan.context import divides_heads
from triptych.plan.matrices import optimizer_problems
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan, Stage
from triptych.plan.rules import unrunnable, usable_tensor_degrees, verify
from triptych.plan.settings import shards_activations
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS
from triptych.search.pins import SEARCHED, Pins

LONG_SEQUENCE = 32_768
"""Sequence length from which context parallelism is looked at without being pinned."""

MOST_CONTEXT = 16
SMALL_MICROBATCH = 8
"""Every divisor up to this size is a micro-batch worth trying, above it powers of two."""

CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Stages on a pipeline rank that are tried without a pin."""

RECOMPUTE_EVERY = (1, 2, 3, 4)
"""Of a stage's layers every k-th is recomputed whole."""

AUTOMATIC_SIZE = 32
"""Pipeline ranks x micro-batches up to which `zb-auto`, itself a search, is tried."""

T = TypeVar("T")


class Degrees(NamedTuple):
    """Ranks along each axis; expert parallelism lives inside data x context."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int


class Sharding(NamedTuple):
    """How ZeRO divides the state of a plan, by the plan's own fields."""

    zero: int
    hybrid_shard: int
    accumulation: str


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans for a model, cluster and workload that keep the pins."""

    model: Model
    cluster: Cluster
    workload: Workload
    pins: Pins
    base: Plan
    runnable_only: bool = False
    across_nodes: bool = False  # tensor parallelism may leave the node
    spare: float = 0.0  # the part of its peak that a plan has to leave free
    rejected: Counter[str] = field(default_factory=Counter, init=False)
    _scheduled: dict[tuple[int, int, int], tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def usable_tensor(self) -> frozenset[int]:
        """Tensor degrees that heads and widths allow."""
        return frozenset(usable_tensor_degrees(self.model, self.cluster.num_devices))

    def room_bytes(self, limit_bytes: float) -> float:
        """The largest peak that leaves enough of a device's memory free."""
        return limit_bytes / (1 + self.spare)

    # --- degrees ---------------------------------------------------------------------------------

    def degrees(self) -> Iterator[Degrees]:
        """Degrees that legal plans have; counts the others in `rejected`, one each."""
        for degrees in self._products():
            reason = self._broken(degrees)
            if reason:
                self.rejected[reason] += 1
            else:
                yield degrees

    def _products(self) -> Iterator[Degrees]:
        """Every way to write the number of devices as tp x pp x cp x dp."""
        devices = self.cluster.num_devices
        sizes = divisors(devices)
        tensor = self.pins.choices("tp", [t for t in sizes if self._may_be_tensor(t)])
        for tp, pp, cp in product(tensor, self.pins.choices("pp", sizes), self.contexts(sizes)):
            dp, rest = divmod(devices, tp * pp * cp)
            if rest or dp not in self.pins.choices("dp", (dp,)):
                continue
            for ep in self.experts():
                yield Degrees(tp, pp, dp, cp, ep)

    def _may_be_tensor(self, tensor: int) -> bool:
        return self.across_nodes or tensor <= self.cluster.devices_per_node

    def contexts(self, sizes: list[int]) -> tuple[int, ...]:
        """Context degrees of some sizes: only 1 unless sequences are long."""
        is_long = self.workload.sequence_length >= LONG_SEQUENCE
        tried = [c for c in sizes if c <= MOST_CONTEXT] if is_long else [1]
        return self._allowed("cp", tried)

    def experts(self) -> tuple[int, ...]:
        """Expert degrees: powers of two that divide the experts."""
        experts = self.model.experts
        tried = divisors(experts.count) if experts else [1]
        return self._allowed("ep", [e for e in tried if e & (e - 1) == 0])

    def _broken(self, degrees: Degrees) -> str:
        """Why no plan with these degrees is legal; empty if some are."""
        tp, pp, dp, cp, ep = degrees
        if tp not in self.usable_tensor:
            return "divisibility: tensor degree and heads"
        if not self._keeps_matrices(stages=(replace(self.base.stages[0], tensor=tp),)):
            return "optimizer of whole matrices"
        if pp * self.pins.chunks > self.model.num_layers:
            return "divisibility: more stages than layers"
        if not self.chunks(degrees):
            return "divisibility: stages and the fixed layers"
        if self.workload.sequence_length % cp:
            return "divisibility: sequence and context degree"
        if (dp * cp) % ep:
            return "divisibility: expert degree and data x context"
        if not self.microbatches(dp):
            return "batch arithmetic"
        if self._sample(degrees) is None:
            return "micro-batches, chunks and schedule"
        return "fixed settings" if self._breaks_other_rules(degrees) else ""

    def _keeps_matrices(self, **changes: Any) -> bool:
        """True if the optimizer can work with a setting."""
        return not any(optimizer_problems(self.base.with_(**changes), self.workload.optimizer))

    def _breaks_other_rules(self, degrees: Degrees) -> bool:
        """True if a fixed setting that no search varies is illegal with these degrees."""
        if self.pins.values.keys() <= {*Degrees._fields, *SEARCHED, "precision"}:
            return False
        sample = self._sample(degrees)
        return sample is None or bool(verify(sample, self.model, self.cluster, self.workload))

    def _sample(self, degrees: Degrees) -> Plan | None:
        """A plan with these degrees: the first that is tried; None if there is none."""
        for plan in self.settings(degrees):
            for chunks in self.chunks(degrees):
                for schedule in self.schedules(degrees, plan.microbatch, chunks):
                    for sharding in self.shardings(degrees):
                        stages = self.stages(degrees, chunks, self.pins.layers)
                        fields = sharding._asdict()
                        return plan.with_(stages=stages, chunks=chunks, schedule=schedule, **fields)
        return None

    def stages(
        self, degrees: Degrees, chunks: int, layers: tuple[int, ...] | None
    ) -> tuple[Stage, ...]:
        """Stages with these degrees and layer counts; an even split if there are none."""
        return Plan.uniform(
            self.model.num_layers, chunks=chunks, layers=layers, **degrees._asdict()
        ).stages

    # --- settings --------------------------------------------------------------------------------

    def settings(self, degrees: Degrees) -> Iterator[Plan]:
        """Plans of one stage with every choice but layers, chunks, schedule and sharding."""
        tp, _, dp, cp, ep = degrees
        stop = self.model.num_layers
        whole = Stage(start=0, stop=stop, data=dp, tensor=tp, context=cp, expert=ep)
        base = self.base.with_(stages=(whole,), chunks=1, compile=self.compiles(cp))
        choices = product(
            self.offloads(),
            self.recomputes(),
            self.sequence_parallel(degrees),
            self.context_methods(degrees),
            self.microbatches(degrees.dp),
        )
        for offload, (recompute, every), is_parallel, method, microbatch in choices:
            if offload == "activations" and recompute != "full":
                continue
            plan = base.with_(
                offload=offload,
                recompute=recompute,
                recompute_every=every,
                sequence_parallel=is_parallel,
                context_method=method,
                microbatch=microbatch,
                shard_activations=False,
            )
            for shards in self.shard_activations(plan):
                yield plan.with_(shard_activations=True) if shards else plan

    def compiles(self, context: int) -> bool:
        """Whether layers are compiled: pinned, or on GPUs where some can be: it costs no time."""
        if "compile" in self.pins.values:
            return self.base.compile
        drops = self.model.dropout
        return self.cluster.device.kind in ("cuda", "rocm") and any(
            obstacle(block, drops=drops, context=context) is None for block in self._kinds
        )

    @cached_property
    def _kinds(self) -> frozenset[Block]:
        """The model's layers, alike ones once."""
        return frozenset(self.model.blocks)

    def microbatches(self, dp: int) -> list[int]:
        """Micro-batches, ascending, by which a data rank's share of the batch divides."""
        share, rest = divmod(self.workload.global_batch, dp)
        if rest:
            return []
        tried = [m for m in divisors(share) if m <= SMALL_MICROBATCH or m & (m - 1) == 0]
        return [m for m in self.pins.choices("microbatch", tried) if share % m == 0]

    def sequence_parallel(self, degrees: Degrees) -> tuple[bool, ...]:
        """Whether to divide sequences over tensor ranks: only if there are several, and it fits."""
        divides = self.workload.sequence_length % (degrees.cp * degrees.tp) == 0
        tried = (False, True) if degrees.tp > 1 and divides else (False,)
        chosen = self.pins.choices("sequence_parallel", tried)
        return tuple(c for c in chosen if divides or not c)

    def context_methods(self, degrees: Degrees) -> tuple[str, ...]:
        """How context ranks share attention; Ulysses where it can deal the heads."""
        attentions = {block.attention for block in self.model.blocks}
        deals = degrees.cp > 1 and all(divides_heads(a, degrees.tp, degrees.cp) for a in attentions)
        return self.pins.choices("context_method", ("ring", "ulysses") if deals else ("ring",))

    def recomputes(self) -> tuple[tuple[str, int], ...]:
        """What backwards may run again, and of how many layers one does."""
        kinds = self._allowed("recompute", ("none", "selective", "full"))
        every = self.pins.choices("recompute_every", RECOMPUTE_EVERY)
        is_fixed = "recompute_every" in self.pins.values
        return tuple(
            (kind, k)
            for kind in kinds
            for k in (every if kind == "full" or is_fixed else (1,))
            if kind != "none" or k == 1
        )

    def shard_activations(self, plan: Plan) -> tuple[bool, ...]:
        """Whether recomputed layers' inputs are divided over tensor ranks, where they can be."""
        if not shards_activations(plan):
            return (False,)
        return self.pins.choices("shard_activations", (False, True))

    def offloads(self) -> tuple[str, ...]:
        """What waits in host memory. Its time is not priced, so nothing unless it is asked for."""
        return self.pins.choices("offload", ("none",))

    def shardings(self, degrees: Degrees) -> tuple[Sharding, ...]:
        """ZeRO stages, over all data ranks or those of a node; without data ranks there is none."""
        stages = (0, 1, 2, 3) if degrees.dp * degrees.cp > 1 else (0,)
        tried = tuple(zero for zero in stages if self._keeps_matrices(zero=zero))
        return tuple(
            Sharding(zero, shard, how)
            for zero in self._allowed("zero", tried)
            for shard in self._hybrids(degrees, zero)
            for how in self._accumulations(zero)
        )

    def _hybrids(self, degrees: Degrees, zero: int) -> tuple[int, ...]:
        inside = max(1, self.cluster.devices_per_node // (degrees.tp * degrees.cp))
        is_apart = zero > 0 and 1 < inside < degrees.dp and degrees.dp % inside == 0
        is_apart = is_apart and inside % degrees.ep == 0  # every expert as often in each set
        return self.pins.choices("hybrid_shard", (0, inside) if is_apart else (0,))

    def _accumulations(self, zero: int) -> tuple[str, ...]:
        tried = ("auto", "reduce_last") if zero > 1 else ("auto",)
        chosen = self.pins.choices("accumulation", tried)
        return tuple(how for how in chosen if zero > 1 or how != "reduce_each")

    # --- pipelines -------------------------------------------------------------------------------

    def chunks(self, degrees: Degrees) -> tuple[int, ...]:
        """Stages that a pipeline rank may run; one rank has no use for several."""
        least = self.pins.chunks
        is_fixed = "chunks" in self.pins.values or degrees.pp == 1
        tried: tuple[int, ...] = (least,) if is_fixed else CHUNKS
        if "schedule" in self.pins.values:
            traits = TRAITS[self.pins.values["schedule"]]
            tried = tuple(c for c in tried if traits.allows_chunks(c)) or (least,)
        counts = (c for c in tried if degrees.pp * c <= self.model.num_layers)
        layers = self.pins.layers
        return tuple(c for c in counts if not layers or len(layers) == degrees.pp * c)

    def schedules(self, degrees: Degrees, microbatch: int, chunks: int) -> tuple[str, ...]:
        """Schedules that have a program; with one stage there is nothing to choose."""
        key = (degrees.pp, self.workload.global_batch // (degrees.dp * microbatch), chunks)
        if key not in self._scheduled:
            self._scheduled[key] = self._schedules(*key)
        return self._scheduled[key]

    def _schedules(self, ranks: int, count: int, chunks: int) -> tuple[str, ...]:
        tried: Sequence[str] = [name for name, t in TRAITS.items() if t.allows_chunks(chunks)]
        if ranks == 1 and chunks == 1:
            tried = (self.base.schedule,)
        elif ranks * count > AUTOMATIC_SIZE:
            tried = [name for name in tried if name != "zb-auto"]
        return tuple(
            name
            for name in self._allowed("schedule", tried)
            if TRAITS[name].allows(ranks, count, chunks)
        )

    def _allowed(self, name: str, tried: Sequence[T]) -> tuple[T, ...]:
        """The pinned value, or the tried ones, if need be only those that run today."""
        if name in self.pins.values or not self.runnable_only:
            return self.pins.choices(name, tried)
        return tuple(value for value in tried if self._runs(name, value))

    def _runs(self, name: str, value: Any) -> bool:
        """True if a value takes nothing away from what runs."""
        stage = self.base.stages[0]
        if name == "cp":
            other = self.base.with_(stages=(replace(stage, context=value),))
        elif name == "ep":
            other = self.base.with_(stages=(replace(stage, expert=value),))
        else:
            other = self.base.with_(**{name: value})
        return set(unrunnable(other, self.model)) <= set(unrunnable(self.base, self.model))
