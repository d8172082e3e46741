"""A plan without its ZeRO stage and schedule, priced: what all of those choices share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from triptych.cost.memory import Memory, overhead_bytes, rank_memory, state_bytes, work_bytes
from triptych.cost.pipeline import Moment, Pair, least_peaks
from triptych.cost.placed import axes_of, placed, stage_pricers
from triptych.cost.pricer import Counts, Pricer, StageCost, with_one_table
from triptych.cost.setting import Setting
from triptych.cost.sharded import sharded_pass
from triptych.cost.site import Site
from triptych.cost.software import Footprint
from triptych.cost.storage import Storage
from triptych.cost.sync import Axes, Tail, step_tail
from triptych.cost.tape import Tape
from triptych.cost.transfer import Hop, hop
from triptych.plan.plan import Plan, Stage
from triptych.plan.transfer import Spread
from triptych.schedule.program import Program
from triptych.schedule.traits import TRAITS


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Stages with their costs. `settings` has one entry per stage, the same one if uniform."""

    pricer: Pricer
    pricers: tuple[Pricer, ...]  # of each stage: its own nodes, where the cluster is mixed
    stages: tuple[Stage, ...]
    settings: tuple[Setting, ...]
    costs: tuple[StageCost, ...]
    chunks: int
    is_v_shaped: bool
    num_microbatches: int

    @classmethod
    def of(cls, pricer: Pricer, plan: Plan) -> Frame:
        """The frame of a plan."""
        shared = Setting.of(plan)
        made: dict[tuple[int, ...], Setting] = {}  # alike stages have the same setting
        for s in plan.stages:
            key = (s.data, s.tensor, s.context, s.expert)
            if key not in made:
                made[key] = shared._replace(
                    tensor=s.tensor,
                    context=s.context,
                    expert=s.expert,
                    sequence_parallel=plan.sequence_parallel and s.tensor > 1,
                    microbatch=plan.microbatch_of(s),
                )
        settings = tuple([made[s.data, s.tensor, s.context, s.expert] for s in plan.stages])
        count = plan.num_microbatches(pricer.workload.global_batch)
        is_v_shaped = TRAITS[plan.schedule].is_v_shaped
        where = placed(len(plan.stages) // plan.chunks, plan.chunks, is_v_shaped)
        pricers = stage_pricers(pricer, plan.stages, where)
        shape = (plan.chunks, is_v_shaped, max(1, count))
        return cls.build(pricer, plan.stages, settings, *shape, pricers)

    @classmethod
    def build(
        cls,
        pricer: Pricer,
        stages: tuple[Stage, ...],
        settings: tuple[Setting, ...],
        chunks: int,
        is_v_shaped: bool,
        num_microbatches: int,
        pricers: tuple[Pricer, ...] = (),
    ) -> Frame:
        """Prices the stages, each with its own of the `pricers`: `pricer` if there are none."""
        last, first = len(stages) - 1, settings[0]
        pricers = pricers or (pricer,) * len(stages)
        if settings.count(first) == len(settings) and pricers.count(pricer) == len(pricers):
            costs = pricer.costs(stages, first)
        else:
            costs = tuple(
                own.stage(_counts(own, s, setting), i == 0, i == last, setting)
                for i, (own, s, setting) in enumerate(zip(pricers, stages, settings, strict=True))
            )
        if last and (is_v_shaped or chunks == len(stages)):
            costs = with_one_table(costs)
        return cls(
            pricer=pricer,
            pricers=pricers,
            stages=stages,
            settings=settings,
            costs=costs,
            chunks=chunks,
            is_v_shaped=is_v_shaped,
            num_microbatches=num_microbatches,
        )

    # --- shape -----------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.stages) // self.chunks

    def stages_of(self, rank: int) -> Sequence[int]:
        """The stages that a pipeline rank runs."""
        if self.is_v_shaped:
            return rank, len(self.stages) - 1 - rank
        return range(rank, len(self.stages), self.num_ranks)

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return placed(self.num_ranks, self.chunks, self.is_v_shaped)

    def program(self, schedule: str, num_microbatches: int) -> Program:
        """The schedule's program for these stages."""
        return self.pricer.program(schedule, self.num_ranks, num_microbatches, self.chunks)

    def tape(self, schedule: str, num_microbatches: int) -> Tape:
        """The steps of the schedule's program for these stages."""
        return self.pricer.tape(schedule, self.num_ranks, num_microbatches, self.chunks)

    def peaks(self, schedule: str) -> tuple[tuple[Moment, ...], ...]:
        """For each pipeline rank, the moments at which it may hold most."""
        return self.pricer.peaks(schedule, self.num_ranks, self.num_microbatches, self.chunks)

    @cached_property
    def kind_of_rank(self) -> tuple[int, ...]:
        """For each pipeline rank, the first one whose stages have the same costs."""
        first: dict[tuple[int, ...], int] = {}
        return tuple(
            first.setdefault(tuple(id(self.costs[stage]) for stage in self.stages_of(rank)), rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """The first pipeline rank of each kind: later ones of a kind need the same or less."""
        return tuple(dict.fromkeys(self.kind_of_rank))

    def _site(self, stage_index: int) -> Site:
        return self.pricers[stage_index].site(self.settings[stage_index])

    @cached_property
    def hop_s(self) -> float:
        """Seconds of the slowest message between neighbouring stages, as far as a stage waits."""
        if self.num_ranks == 1:
            return 0.0
        if self.pricer.software.hides_messages:  # all but those of the first and last micro-batches
            return self._slowest_hop_s() * min(1.0, (self.num_ranks - 1) / self.num_microbatches)
        if not self._is_alike:
            return self._slowest_hop_s()
        known, key = self.pricer.hops_s, (self.settings[0], self.stages[0].data, self.num_ranks)
        if key not in known:
            known[key] = self._slowest_hop_s()
        return known[key]

    def _slowest_hop_s(self) -> float:
        group = self.pricer.group(self.num_ranks, max(s.num_devices for s in self.stages))
        return self.pricer.software.message_s + max(
            group.send_s(hop.sent_bytes)
            + self._site(hop.target).tensor.gather_s(hop.gathered_bytes)
            for hop in self._hops(self._neighbours)
        )

    @cached_property
    def _is_alike(self) -> bool:
        """True if all stages have the same degrees and the same setting."""
        return self.is_uniform and len(set(map(id, self.settings))) == 1

    @cached_property
    def _neighbours(self) -> tuple[int, ...]:
        """The first stage of each kind of two neighbours."""
        first: dict[tuple[object, ...], int] = {}
        if self._is_alike:
            return (0,)
        kinds = [
            (s.data, s.context, s.tensor, id(setting), id(own))
            for s, setting, own in zip(self.stages, self.settings, self.pricers, strict=True)
        ]
        for index, pair in enumerate(pairwise(kinds)):
            if self.placement[index] != self.placement[index + 1]:
                first.setdefault(pair, index)
        return tuple(first.values())

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The messages of a micro-batch between pipeline ranks, forward and backward."""
        pairs = pairwise(self.placement)
        return tuple(self._hops(index for index, (a, b) in enumerate(pairs) if a != b))

    def _hops(self, starts: Iterable[int]) -> Iterator[Hop]:
        """The messages between some stages and their successors."""
        for start in starts:
            pair = (start, start + 1)
            stages, settings = [self.stages[i] for i in pair], [self.settings[i] for i in pair]
            spreads = [
                Spread(s.data, s.context, s.tensor, setting.sequence_parallel)
                for s, setting in zip(stages, settings, strict=True)
            ]
            sites = [self._site(index) for index in pair]
            for source, target in ((0, 1), (1, 0)):
                found = hop(source, target, spreads, settings, sites)
                yield found._replace(source=start + source, target=start + target)

    def axes(self, stage_index: int) -> Axes:
        """The groups over which a stage synchronises."""
        stage = self.stages[stage_index]
        pricer = self.pricers[stage_index]
        key = (stage.data, stage.context, stage.tensor, stage.expert, id(pricer))
        if key not in self._axes:
            self._axes[key] = axes_of(self.pricer, pricer, stage, self.num_ranks)
        return self._axes[key]

    @cached_property
    def _axes(self) -> dict[tuple[int, ...], Axes]:
        return {}

    # --- costs under a ZeRO stage ----------------------------------------------------------------

    @cached_property
    def is_uniform(self) -> bool:
        """True if all stages share their state over equally many ranks."""
        return len({(s.data, s.context, s.expert) for s in self.stages}) == 1

    def storage(self, storage: Storage, index: int) -> Storage:
        """A plan's storage for one stage: the first stage's, but for its own ranks."""
        if self.is_uniform or storage.is_hybrid:
            return storage
        stage = self.stages[index]
        ranks = stage.data * stage.context
        return storage._replace(shards=ranks, expert_shards=max(1, ranks // stage.expert))

    def passes(self, storage: Storage) -> tuple[list[Pair], list[Pair]]:
        """Seconds of each stage's forward and backward, and of the backward's I and W.

        ZeRO's own traffic is in them: what a backward has of it is in I.
        """
        if storage.zero < 2:
            return self._plain_passes
        pairs, halves = [], []
        extra: dict[int, Pair] = {}  # alike stages have one cost
        for index, cost in enumerate(self.costs):
            if id(cost) not in extra:
                extra[id(cost)] = self.sharded(storage, index)
            forward_s, backward_s = extra[id(cost)]
            pairs.append((cost.forward_s + forward_s, cost.backward_s + backward_s))
            halves.append((cost.input_s + backward_s, cost.weight_s))
        return pairs, halves

    @cached_property
    def _plain_passes(self) -> tuple[list[Pair], list[Pair]]:
        return (
            [(cost.forward_s, cost.backward_s) for cost in self.costs],
            [(cost.input_s, cost.weight_s) for cost in self.costs],
        )

    def sharded(self, storage: Storage, stage_index: int) -> Pair:
        """Exposed seconds that ZeRO-2 and 3 add to a stage's forward and backward."""
        if storage.zero < 2:
            return 0.0, 0.0
        cost, stage = self.costs[stage_index], self.stages[stage_index]
        storage = self.storage(storage, stage_index)
        shards = self.pricers[stage_index].group(storage.shards, stage.tensor)
        exposed = sharded_pass(
            cost.holdings,
            cost.num_units,
            stage.num_layers,
            storage,
            shards.on_one_port() if self.pricer.software.one_port else shards,
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            most_hidden=self.pricer.software.hides_shards,
        )
        return exposed.forward_s, exposed.backward_s

    def tail(self, rank: int, storage: Storage) -> Tail:
        """Exposed seconds of a pipeline rank's end of step."""
        known: dict[int, Tail] = {}  # alike stages have one cost
        terms = []
        for stage in self.stages_of(rank):
            key = id(self.costs[stage])
            if key not in known:
                known[key] = self._stage_tail(stage, storage)
            terms.append(known[key])
        return terms[0] if len(terms) == 1 else Tail(*map(sum, zip(*terms, strict=True)))

    def _stage_tail(self, index: int, storage: Storage) -> Tail:
        cost, setting = self.costs[index], self.settings[index]
        rates = self.pricers[index].rates(setting.dtype)
        return step_tail(
            cost.holdings,
            self.storage(storage, index),
            self.axes(index),
            last_backward_s=cost.backward_s,
            sequence_parallel=setting.sequence_parallel,
            memory_bytes_per_s=rates.memory_bytes_per_s,
            matrix_flops_per_s=self.pricers[index].rates("bf16").gemm_flops,
            optimizer=rates.optimizer,
            software=self.pricer.software,
        )

    # --- memory ----------------------------------------------------------------------------------

    @property
    def is_cpu(self) -> bool:
        """True on CPUs, where communication takes the processor's time."""
        return self.pricer.device.kind == "cpu"

    @property
    def footprint(self) -> Footprint:
        """What the program holds beside what the plan says."""
        return self.pricer.software.footprint

    def exchange_bytes(self, rank: int, schedule: str) -> float:
        """Hidden states on their way: one to send, one to receive, one gathered sequence, and what
        the program keeps more for the micro-batches in flight.
        """
        setting, cost, kept = self.settings[rank], self.costs[rank], self.footprint
        site, is_alone = self._site(rank), self.num_ranks == 1
        waiting = 0.0 if is_alone else 2 * site.message_bytes(setting)
        if not is_alone and (kept.stage_outputs or kept.more_in_flight):
            in_flight = max(sum(a.in_flight for a in m) for m in self.peaks(schedule)[rank])
            more = kept.more_in_flight
            waiting += more * cost.saved_bytes
            waiting += (in_flight + more) * kept.stage_outputs * site.message_bytes(setting)
        return waiting + (site.activation_bytes(setting) if setting.sequence_parallel else 0.0)

    def memory(self, rank: int, storage: Storage, schedule: str) -> Memory:
        """Peak bytes of a pipeline rank under a schedule."""
        return rank_memory(
            [self.costs[stage] for stage in self.stages_of(rank)],
            self.peaks(schedule)[rank],
            self.storage(storage, rank),
            self.exchange_bytes(rank, schedule),
            self.footprint,
            self.is_cpu,
        )

    def fullest_rank(self, storage: Storage, schedule: str) -> int:
        """The pipeline rank that needs the largest part of what its devices have."""

        def share(rank: int) -> float:
            used = self.memory(rank, storage, schedule).total_bytes
            return used / self.pricers[rank].memory_limit_bytes

        return max(self.distinct, key=share)

    def largest_memory(self, storage: Storage, schedule: str) -> Memory:
        """The memory of that rank."""
        return self.memory(self.fullest_rank(storage, schedule), storage, schedule)

    def state(self, storage: Storage, ranks: Sequence[int] | None = None) -> list[float]:
        """Bytes of the model's state on some ranks (`distinct`): the part that ZeRO changes."""
        return [
            sum(
                state_bytes(
                    [self.costs[s] for s in self.stages_of(rank)],
                    self.storage(storage, rank),
                    self.footprint,
                )
            )
            for rank in (self.distinct if ranks is None else ranks)
        ]

    def work(self, schedule: str) -> list[float]:
        """Bytes of activations on each rank of `distinct`: the part that the schedule changes."""
        return self._work(schedule, self.peaks(schedule), self.distinct)

    def least_work(self, schedule: str, ranks: Sequence[int] | None = None) -> list[float]:
        """What `work` is at least on some ranks (`distinct`), without the schedule's program."""
        peaks = least_peaks(schedule, self.num_ranks, self.num_microbatches, self.chunks)
        return self._work(schedule, peaks, self.distinct if ranks is None else ranks)

    def _work(
        self, schedule: str, peaks: Sequence[Sequence[Moment]], ranks: Sequence[int]
    ) -> list[float]:
        assert len(peaks) == self.num_ranks, f"{schedule} has moments of every rank"
        work = []
        for rank in ranks:
            costs = [self.costs[s] for s in self.stages_of(rank)]
            kept = work_bytes(costs, peaks[rank], self.footprint)
            work.append(sum(kept) + self.exchange_bytes(rank, schedule))
        return work

    def _used_bytes(self, tensors: float) -> float:
        return tensors + sum(overhead_bytes(tensors, self.footprint, self.is_cpu))

    def peak_bytes(self, state: Sequence[float], work: Sequence[float]) -> float:
        """The peak of the largest rank, as `largest_memory` has it, from its two parts."""
        tensors = max(map(sum, zip(state, work, strict=True)))
        return self._used_bytes(tensors)


def _counts(pricer: Pricer, stage: Stage, setting: Setting) -> Counts:
    return pricer.counts(stage.start, stage.stop, setting.recompute_every)
