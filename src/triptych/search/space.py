"""The plans that a search looks at: degrees that multiply to the cluster, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from triptych.cluster.cluster import Cluster
from triptych.model.model import Model
from triptych.plan.context import divides_heads
from triptych.plan.matrices import optimizer_problems
from triptych.plan.nearby import divisors
from triptych.plan.plan import Plan
from triptych.plan.rules import unrunnable, usable_tensor_degrees, verify
from triptych.plan.workload import Workload
from triptych.schedule.traits import TRAITS
from triptych.search.pins import SEARCHED, Pins

LONG_SEQUENCE = 32_768
"""Sequence length from which context parallelism is looked at without being pinned."""

MOST_CONTEXT = 16
SMALL_MICROBATCH = 8
"""Every divisor up to this size is a micro-batch worth trying, above it powers of two."""

SEARCHED_SCHEDULES = ("gpipe", "1f1b")
"""Schedules that are tried without a pin. With pinned chunks those are tried that have as many."""

T = TypeVar("T")


class Degrees(NamedTuple):
    """Ranks along each axis; expert parallelism lives inside data x context."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All plans for a model, cluster and workload that keep the pins."""

    model: Model
    cluster: Cluster
    workload: Workload
    pins: Pins
    base: Plan
    runnable_only: bool = False
    across_nodes: bool = False  # tensor parallelism may leave the node
    rejected: Counter[str] = field(default_factory=Counter, init=False)
    usable_tensor: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        usable = usable_tensor_degrees(self.model, self.cluster.num_devices)
        object.__setattr__(self, "usable_tensor", frozenset(usable))

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
        for tp, pp, cp in product(tensor, self.pins.choices("pp", sizes), self._contexts(sizes)):
            dp, rest = divmod(devices, tp * pp * cp)
            if rest or dp not in self.pins.choices("dp", (dp,)):
                continue
            for ep in self._experts():
                yield Degrees(tp, pp, dp, cp, ep)

    def _may_be_tensor(self, tensor: int) -> bool:
        return self.across_nodes or tensor <= self.cluster.devices_per_node

    def _contexts(self, sizes: list[int]) -> tuple[int, ...]:
        is_long = self.workload.sequence_length >= LONG_SEQUENCE
        tried = [c for c in sizes if c <= MOST_CONTEXT] if is_long else [1]
        return self._allowed("cp", tried)

    def _experts(self) -> tuple[int, ...]:
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
        if pp * self.base.chunks > self.model.num_layers:
            return "divisibility: more stages than layers"
        if self.pins.layers and len(self.pins.layers) != pp * self.base.chunks:
            return "divisibility: stages and the fixed layers"
        if self.workload.sequence_length % cp:
            return "divisibility: sequence and context degree"
        if (dp * cp) % ep:
            return "divisibility: expert degree and data x context"
        if not self.microbatches(dp):
            return "batch arithmetic"
        if not any(self.schedules(degrees, m) for m in self.microbatches(dp)):
            return "micro-batches, chunks and schedule"
        return "fixed settings" if self._breaks_other_rules(degrees) else ""

    def _keeps_matrices(self, **changes: Any) -> bool:
        """True if the optimizer can work with a setting."""
        return not any(optimizer_problems(self.base.with_(**changes), self.workload.optimizer))

    def _breaks_other_rules(self, degrees: Degrees) -> bool:
        """True if a fixed setting that no search varies is illegal with these degrees."""
        if self.pins.values.keys() <= {*Degrees._fields, *SEARCHED, "precision"}:
            return False
        return bool(verify(self._sample(degrees), self.model, self.cluster, self.workload))

    def _sample(self, degrees: Degrees) -> Plan:
        """A plan with these degrees: the fixed settings, otherwise the first that is tried."""
        uniform = Plan.uniform(
            self.model.num_layers,
            chunks=self.base.chunks,
            layers=self.pins.layers,
            **degrees._asdict(),
        )
        microbatch = self.microbatches(degrees.dp)[0]
        schedule = self.schedules(degrees, microbatch)[0]
        return self.base.with_(stages=uniform.stages, microbatch=microbatch, schedule=schedule)

    # --- settings --------------------------------------------------------------------------------

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

    def recomputes(self) -> tuple[str, ...]:
        """What backwards may run again; `selective` pays only where scores are materialised."""
        if self.base.offload == "activations":
            return self._allowed("recompute", ("full",))
        tried = (
            ("none", "selective", "full") if self.base.attention == "eager" else ("none", "full")
        )
        return self._allowed("recompute", tried)

    def zeros(self, degrees: Degrees) -> tuple[int, ...]:
        """ZeRO stages; without data ranks there is nothing to share."""
        tried = (0, 1, 2, 3) if degrees.dp * degrees.cp > 1 else (0,)
        return self._allowed("zero", [z for z in tried if self._keeps_matrices(zero=z)])

    def schedules(self, degrees: Degrees, microbatch: int) -> tuple[str, ...]:
        """Schedules that have a program; with one stage there is nothing to choose."""
        chunks = self.base.chunks
        tried: Sequence[str] = SEARCHED_SCHEDULES if degrees.pp > 1 else (self.base.schedule,)
        if chunks > 1:
            tried = [name for name, traits in TRAITS.items() if traits.allows_chunks(chunks)]
        count = self.workload.global_batch // (degrees.dp * microbatch)
        return tuple(
            name
            for name in self._allowed("schedule", tried)
            if TRAITS[name].allows(degrees.pp, count, chunks)
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
