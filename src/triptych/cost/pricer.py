"""Costs of layers and stages of one model on one cluster for one workload, each computed once.

A plan is priced from pieces: a layer under a `Setting`, the embedding, the head. A search meets
the same piece in thousands of plans, so they are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from triptych.cluster.cluster import Cluster
from triptych.cost.ends import embedding_cost, head_cost
from triptych.cost.holdings import Holdings, holdings, with_matrices
from triptych.cost.kernels.collectives import Group, group
from triptych.cost.kernels.rates import Rates, memory_limit_bytes, rates, slowest_device
from triptych.cost.layer import layer_cost
from triptych.cost.pipeline import Moment, enough_microbatches, known_peaks, program_peaks
from triptych.cost.setting import Parts, PieceCost, Setting
from triptych.cost.shard import LocalOperator, localize
from triptych.cost.site import Site
from triptych.cost.software import TRIPTYCH, Software
from triptych.cost.tape import Tape, period_of, tape_of
from triptych.model.count import training_flops_per_token
from triptych.model.model import Model
from triptych.model.operators import block_operators, embedding_operators, head_operators
from triptych.plan.compiled import obstacle
from triptych.plan.matrices import MUON
from triptych.plan.plan import Stage
from triptych.plan.workload import Workload
from triptych.schedule.generate import build_program
from triptych.schedule.program import Program


class Layers(NamedTuple):
    """So many layers of a kind of block, or an end of the model, under one setting."""

    kind: int
    setting: Setting
    number: int


class StageCost(NamedTuple):
    """What one pipeline stage costs a rank for one micro-batch."""

    forward: Parts
    backward: Parts
    forward_s: float
    backward_s: float
    saved_bytes: float  # kept from forward to backward
    working_bytes: float  # on top while a backward runs
    logits_bytes: float
    head_gradient_bytes: float  # kept from forward to backward, last stage only
    input_s: float  # I of a split backward
    weight_s: float  # W of a split backward
    deferred_bytes: float  # kept from I to W of a split backward
    recomputed_flops: float
    num_units: int  # layers and ends
    largest_unit: int  # parameter elements of the largest layer or end
    largest_weight: int  # of the largest single tensor that autograd makes a gradient for
    shapes: int  # elements of one weight of each shape that a layer's products have
    holdings: Holdings


class Tenants(NamedTuple):
    """The layers and ends of a stage, without what they cost."""

    num_units: int
    largest_unit: int
    largest_weight: int
    shapes: int
    holdings: Holdings


Counts = tuple[int, ...]
"""Layers of a stage by kind of block, in the order of `Pricer.kinds`; if only some are recomputed
(`Setting.recompute_every`) those first, then the others."""


Alike = tuple[list[tuple[Counts, bool, bool]], list[int]]
"""Kinds of stages (layers, is it the first, is it the last), and for each stage its kind."""


class Pricer:
    """Prices pieces; pure but for its memory of what it priced before."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        workload: Workload,
        software: Software = TRIPTYCH,
    ) -> None:
        self.model, self.cluster, self.workload = model, cluster, workload
        self.software = software
        self.device = slowest_device(cluster)
        self.memory_limit_bytes = memory_limit_bytes(cluster)
        self.kinds = tuple(dict.fromkeys(model.blocks))
        index = {block: i for i, block in enumerate(self.kinds)}
        self.kind_of_layer = [index[block] for block in model.blocks]
        self.ends_s: dict[tuple[object, ...], list[float]] = {}  # of programs that were simulated
        self.hops_s: dict[tuple[Setting, int, int], float] = {}  # of plans whose stages are alike
        self._programs: dict[tuple[str, int, int, int], Program] = {}
        self._tapes: dict[tuple[str, int, int, int], Tape] = {}
        self._peaks: dict[tuple[str, int, int, int], tuple[tuple[Moment, ...], ...]] = {}
        self._rates: dict[str, Rates] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._local: dict[tuple[int, int, int], tuple[LocalOperator, ...]] = {}
        self._units: dict[tuple[int, int, int], Holdings] = {}
        self._tenants: dict[tuple[object, ...], Tenants] = {}
        self._layers: dict[tuple[int, Setting], PieceCost] = {}
        self._stages: dict[tuple[Counts, bool, bool, Setting], StageCost] = {}
        self._sites: dict[Setting, Site] = {}
        self._parts: dict[frozenset[int], Pricer] = {}
        # by identity: the stages are kept with what was found
        self._kinds: dict[tuple[int, int], tuple[tuple[Stage, ...], Alike]] = {}

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of the model in a step, over all ranks, without what backwards repeat."""
        per_token = training_flops_per_token(self.model, self.workload.sequence_length)
        return per_token * self.workload.tokens

    def on(self, groups: frozenset[int]) -> Pricer:
        """Prices what runs on some of the cluster's groups of nodes, by index, and nowhere else."""
        if len(groups) == len(self.cluster.groups):
            return self
        if groups not in self._parts:
            nodes = tuple(self.cluster.groups[index] for index in sorted(groups))
            part = replace(self.cluster, groups=nodes)
            self._parts[groups] = Pricer(self.model, part, self.workload, self.software)
        return self._parts[groups]

    # --- what pieces are priced with -----------------------------------------------------------

    def rates(self, dtype: str) -> Rates:
        """The device's rates for a dtype."""
        if dtype not in self._rates:
            found = rates(self.device, dtype)
            self._rates[dtype] = found.slowed(self.software.fp8_rate) if dtype == "fp8" else found
        return self._rates[dtype]

    def group(self, size: int, stride: int) -> Group:
        """A group of `size` ranks, `stride` apart."""
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = group(self.cluster, size, stride)
        return self._groups[key]

    def site(self, setting: Setting) -> Site:
        """Where a setting's pieces run. Order of ranks: tp fastest, then cp; ep inside cp x dp."""
        if setting not in self._sites:
            self._sites[setting] = Site(
                model=self.model,
                sequence_length=self.workload.sequence_length,
                rates=self.rates(setting.dtype),
                software=self.software,
                tensor=self.group(setting.tensor, 1),
                context=self.group(setting.context, setting.tensor),
                expert=self.group(setting.expert, setting.tensor),
            )
        return self._sites[setting]

    def program(self, name: str, ranks: int, num_microbatches: int, chunks: int) -> Program:
        """A schedule's program, without sends and receives."""
        key = (name, ranks, num_microbatches, chunks)
        if key not in self._programs:
            self._programs[key] = build_program(*key)
        return self._programs[key]

    def tape(self, name: str, ranks: int, num_microbatches: int, chunks: int) -> Tape:
        """The steps of a schedule's program; one tape serves many numbers of micro-batches."""
        least, each = period_of(name, ranks)
        if each and num_microbatches > least + each:
            base = least + (num_microbatches - least) % each
            short = self._tape(name, ranks, base + each, chunks)
            if short.period:
                return short._replace(repeats=(num_microbatches - base) // each)
        return self._tape(name, ranks, num_microbatches, chunks)

    def _tape(self, name: str, ranks: int, num_microbatches: int, chunks: int) -> Tape:
        key = (name, ranks, num_microbatches, chunks)
        if key not in self._tapes:
            self._tapes[key] = tape_of(*key)
        return self._tapes[key]

    def peaks(
        self, name: str, ranks: int, num_microbatches: int, chunks: int
    ) -> tuple[tuple[Moment, ...], ...]:
        """For each pipeline rank, the moments at which it may hold most."""
        known = known_peaks(name, ranks, num_microbatches, chunks)
        if known:
            return known
        key = (name, ranks, enough_microbatches(name, ranks, num_microbatches), chunks)
        if key not in self._peaks:
            self._peaks[key] = program_peaks(self.program(*key))
        return self._peaks[key]

    def counts(self, start: int, stop: int, every: int = 1) -> Counts:
        """Layers `start` to `stop` by kind; those with a multiple of `every` first, if not all."""
        if every == 1:
            return self._count(range(start, stop))
        first = range(-(-start // every) * every, stop, every)
        others = [layer for layer in range(start, stop) if layer % every]
        return self._count(first) + self._count(others)

    def _count(self, layers: Sequence[int]) -> Counts:
        if len(self.kinds) == 1:
            return (len(layers),)
        kinds = [self.kind_of_layer[layer] for layer in layers]
        return tuple(kinds.count(kind) for kind in range(len(self.kinds)))

    def layers(self, counts: Counts, setting: Setting) -> Iterator[Layers]:
        """The layers of a stage, alike ones together."""
        for index, count in enumerate(counts):
            again, kind = divmod(index, len(self.kinds))
            if count:
                yield Layers(kind, setting.kept if again else setting, count)

    # --- pieces ----------------------------------------------------------------------------------

    def local(self, kind: int, setting: Setting) -> tuple[LocalOperator, ...]:
        """The slowest rank's operators: of a kind of block, of `EMBEDDING` or of `HEAD`."""
        key = (kind, setting.tensor, setting.expert)
        if key not in self._local:
            block = self.kinds[kind] if kind >= 0 else None
            if block is not None:
                operators = block_operators(self.model, block)
            else:
                operators = (embedding_operators if kind == EMBEDDING else head_operators)(
                    self.model
                )
            self._local[key] = tuple(
                localize(op, self.model, block, setting.tensor, setting.expert) for op in operators
            )
        return self._local[key]

    def piece(self, kind: int, setting: Setting) -> PieceCost:
        """The cost of a layer of some kind, of the embedding or of the head."""
        setting = self.as_compiled(kind, setting)
        key = (kind, setting)
        if key not in self._layers:
            site, local = self.site(setting), self.local(kind, setting)
            if kind >= 0:
                cost = layer_cost(site, self.kinds[kind], local, setting)
            else:
                cost = (embedding_cost if kind == EMBEDDING else head_cost)(site, local, setting)
            self._layers[key] = cost
        return self._layers[key]

    def as_compiled(self, kind: int, setting: Setting) -> Setting:
        """A setting as a piece has it: some are not compiled, whatever the plan says."""
        if not setting.compile or self.software.compiles_all:
            return setting
        block = self.kinds[kind] if kind >= 0 else None
        runs = block and not obstacle(block, drops=self.model.dropout, context=setting.context)
        return setting if runs else setting._replace(compile=False)

    def unit(self, kind: int, setting: Setting) -> Holdings:
        """The parameters of a layer of some kind, of the embedding or of the head on a rank."""
        key = (kind, setting.tensor, setting.expert)
        if key not in self._units:
            block = self.kinds[kind] if kind >= 0 else None
            local = self.local(kind, setting)
            held = holdings(local, block, self.model.hidden, setting.tensor)
            if block is not None and self.workload.optimizer == MUON:
                held = with_matrices(held, local, block)
            self._units[key] = held
        return self._units[key]

    def stage(self, counts: Counts, is_first: bool, is_last: bool, setting: Setting) -> StageCost:
        """The cost of a stage with these layers, and the ends of the model if they are its own."""
        key = (counts, is_first, is_last, setting)
        if key not in self._stages:
            self._stages[key] = self._price_stage(*key)
        return self._stages[key]

    def costs(self, stages: tuple[Stage, ...], setting: Setting) -> tuple[StageCost, ...]:
        """The costs of stages that have one setting; the same object for alike ones."""
        kinds, places = self._alike(stages, setting.recompute_every)
        priced = [self.stage(*kind, setting) for kind in kinds]
        return tuple([priced[place] for place in places])

    def _alike(self, stages: tuple[Stage, ...], every: int) -> Alike:
        """The kinds of some stages, and the kind of each."""
        key = (id(stages), every)
        if key not in self._kinds:
            found: dict[tuple[Counts, bool, bool], int] = {}
            last = len(stages) - 1
            places = [
                found.setdefault(
                    (self.counts(stage.start, stage.stop, every), i == 0, i == last), len(found)
                )
                for i, stage in enumerate(stages)
            ]
            self._kinds[key] = stages, (list(found), places)
        return self._kinds[key][1]

    def _price_stage(
        self, counts: Counts, is_first: bool, is_last: bool, setting: Setting
    ) -> StageCost:
        layers = list(self.layers(counts, setting))
        layers += [Layers(EMBEDDING, setting, 1)] if is_first else []
        layers += [Layers(HEAD, setting, 1)] if is_last else []
        costs = [(self.piece(kind, own), count) for kind, own, count in layers]
        held = self._held([(kind, count) for kind, _, count in layers], setting)
        accumulation_s = self._accumulation_s(held.holdings, setting)
        forward, backward = Parts(), Parts()
        for cost, count in costs:
            forward = forward.plus(cost.forward, count)
            backward = backward.plus(cost.backward, count)
        backward = backward.plus(Parts(compute_s=accumulation_s))
        return StageCost(
            forward=forward,
            backward=backward,
            forward_s=forward.total_s,
            backward_s=backward.total_s,
            saved_bytes=sum([cost.saved_bytes * count for cost, count in costs]),
            working_bytes=max([cost.working_bytes for cost, _ in costs]),
            logits_bytes=max([cost.logits_bytes for cost, _ in costs]),
            head_gradient_bytes=max([cost.head_gradient_bytes for cost, _ in costs]),
            input_s=sum([cost.split_input_s * count for cost, count in costs]),
            weight_s=accumulation_s + sum([cost.weight_s * count for cost, count in costs]),
            deferred_bytes=sum([cost.deferred_bytes * count for cost, count in costs]),
            recomputed_flops=sum([cost.recomputed_flops * count for cost, count in costs]),
            **held._asdict(),
        )

    def _held(self, pieces: list[tuple[int, int]], setting: Setting) -> Tenants:
        """What a stage of these pieces holds: of a setting, only ranks matter."""
        key = (*pieces, setting.tensor, setting.expert)
        if key not in self._tenants:
            weights = [
                op.weight_elements
                for kind, _ in pieces
                # where it is kept, the head's gradient is counted on its own
                if kind != HEAD or self.software.footprint.in_place
                for op in self.local(kind, setting)
            ]
            self._tenants[key] = Tenants(
                num_units=sum(count for _, count in pieces),
                largest_unit=max(self.unit(kind, setting).total for kind, _ in pieces),
                largest_weight=max(weights, default=0),
                shapes=self._shapes([kind for kind, _ in pieces if kind >= 0], setting),
                holdings=self._holdings(pieces, setting),
            )
        return self._tenants[key]

    def _shapes(self, kinds: list[int], setting: Setting) -> int:
        """Elements of one weight of each shape that products of layers have."""
        products = [
            op for kind in kinds for op in self.local(kind, setting) if op.operator.kind == "gemm"
        ]
        return sum(k * n for k, n in {(op.k, op.n) for op in products})

    def _holdings(self, pieces: list[tuple[int, int]], setting: Setting) -> Holdings:
        """Parameters of a stage. A tied table is held once by a stage with both ends."""
        held = Holdings()
        for kind, count in pieces:
            held = held.plus(self.unit(kind, setting), count)
        ends = {EMBEDDING, HEAD} & {kind for kind, _ in pieces}
        if not self.model.tied or not ends:
            return held
        table = self.local(HEAD, setting)[1].weight_elements
        if len(ends) == 2:
            return held._replace(dense=held.dense - table)
        return held._replace(tied=table)

    def _accumulation_s(self, held: Holdings, setting: Setting) -> float:
        """Adding a micro-batch's gradients into the fp32 buffers: one read, one read and write."""
        used = self.rates(setting.dtype)
        moved_bytes = self.software.accumulation_bytes or used.element_bytes + 8.0
        if self.software.footprint.in_place and used.element_bytes >= 4:
            moved_bytes = used.element_bytes  # products add as they write
        return held.total * moved_bytes / used.memory_bytes_per_s


EMBEDDING, HEAD = -1, -2


def with_one_table(costs: tuple[StageCost, ...]) -> tuple[StageCost, ...]:
    """Both ends of the model on one rank: a tied table is the first stage's, and no exchange."""
    first, last = costs[0].holdings, costs[-1].holdings
    return (
        costs[0]._replace(holdings=first._replace(tied=0)),
        *costs[1:-1],
        costs[-1]._replace(holdings=last._replace(dense=last.dense - last.tied, tied=0)),
    )
