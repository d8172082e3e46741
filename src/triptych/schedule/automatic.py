"""The automatic zero-bubble schedule under a memory limit (Qi et al. 2024, sec. 3.1).

All ranks are run forward in time together. A rank that is free takes, of what its neighbours have
delivered and its memory allows, the action that a handful of rules prefer; the rules have
alternatives, all combinations are tried, and the program whose busiest rank needs the shortest
span wins. Where the hand-made ZB-H1 or ZB-H2 fits in the memory too and
is faster, it is taken: so the automatic schedule is never slower than those.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from triptych.schedule.action import Action, Kind
from triptych.schedule.program import Program
from triptych.schedule.simulate import peak_held, simulate
from triptych.schedule.zero_bubble import zb_h1, zb_h2

Row = list[Action]

_EXACT = 1 + 1e-9
"""Sums that differ by rounding alone are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of F, I, W of a stage, and of a message between two."""

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    hop_s: float = 0.0

    def of(self, kind: Kind) -> float:
        """Seconds of an action."""
        if kind is Kind.F:
            return self.forward_s
        return self.input_s if kind is Kind.I else self.weight_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank may hold: so many micro-batches between F and I.

    A micro-batch between I and W counts as `weight_share` of one: M_W / M_B of the paper, 1 where
    the inputs of linear layers and the gradients of their outputs are nearly all that is kept.
    """

    microbatches: float
    weight_share: float = 1.0


class _Price(NamedTuple):
    """What makes one program better than another; the smaller the better."""

    longest_s: float  # span of the busiest rank, from its first action to its last
    end_s: float  # of the last rank
    held: float  # most micro-batches on a rank, as `Memory` counts them


class _Rules(NamedTuple):
    """The alternatives of the heuristic."""

    fills_first_gap: bool  # warm up with one more F even if the first I then has to wait for it
    alternates: bool  # after an I comes an F if there is one; otherwise an I always goes first
    fills_small_gaps: bool  # W even where the gap is shorter than W


def zb_auto(
    num_stages: int,
    num_microbatches: int,
    *,
    memory: Memory | None = None,
    durations: Durations | None = None,
) -> list[Row]:
    """The best program found that keeps to the memory on every rank.

    Absent, `memory` is 2p micro-batches from F to W, twice that of 1F1B, which leaves hardly a
    bubble (with p it does as well as ZB-H1); `durations` are 1, 1, 1 and 0.
    """
    seconds = durations or Durations()
    limit = memory or Memory(microbatches=2 * num_stages)
    candidates = _candidates(num_stages, num_microbatches, limit, seconds)
    best = min(candidates, key=lambda candidate: candidate[0])[1]
    return [list(row) for row in best.actions]


def _candidates(
    num_stages: int, num_microbatches: int, limit: Memory, seconds: Durations
) -> Iterator[tuple[_Price, Program]]:
    """Programs that keep to the memory, with their prices."""
    for choice in product((True, False), repeat=len(_Rules._fields)):
        run = _Run(num_stages, num_microbatches, limit, seconds, _Rules(*choice))
        run.to_the_end()
        yield run.price, _program(run.rows, num_microbatches)
    for by_hand in (zb_h1, zb_h2):
        program = _program(by_hand(num_stages, num_microbatches), num_microbatches)
        held = max(peak_held(program, weight_share=limit.weight_share))
        if held <= limit.microbatches * _EXACT:
            yield _price(program, held, seconds), program


def _program(rows: list[Row], num_microbatches: int) -> Program:
    return Program(
        name="zb-auto",
        placement=tuple(range(len(rows))),
        num_microbatches=num_microbatches,
        actions=tuple(map(tuple, rows)),
    )


def _price(program: Program, held: float, seconds: Durations) -> _Price:
    """The price of a program that was made without looking at seconds."""
    timeline = simulate(program, lambda action: seconds.of(action.kind), lambda _: seconds.hop_s)
    return _Price(timeline.longest_span_s, timeline.end_s, held)


class _Rank:
    """One rank: its clock, what it has done, and when its inputs are there."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.row: Row = []
        self.start_s = 0.0
        self.free_s = 0.0
        self.most_held = 0.0
        self.done = {Kind.F: 0, Kind.I: 0, Kind.W: 0}
        self.arrived_s: dict[Kind, list[float]] = {Kind.F: [], Kind.I: []}

    def held(self, weight_share: float) -> float:
        """Micro-batches that it holds, those that wait for W alone as their share."""
        forwards, inputs, weights = (self.done[kind] for kind in (Kind.F, Kind.I, Kind.W))
        return forwards - inputs + weight_share * (inputs - weights)

    def next_input_s(self, kind: Kind) -> float | None:
        """When the input of the next F or I is there, if that is known yet."""
        arrived, index = self.arrived_s[kind], self.done[kind]
        return arrived[index] if index < len(arrived) else None


class _Run:
    """One run of the heuristic under fixed rules."""

    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        limit: Memory,
        seconds: Durations,
        rules: _Rules,
    ) -> None:
        self.count, self.limit, self.seconds, self.rules = num_microbatches, limit, seconds, rules
        self.ranks = [_Rank(stage) for stage in range(num_stages)]
        self.ranks[0].arrived_s[Kind.F] = [0.0] * num_microbatches
        self.events = [(0.0, 0)]

    @property
    def rows(self) -> list[Row]:
        """The program."""
        return [rank.row for rank in self.ranks]

    @property
    def price(self) -> _Price:
        """The price of the program."""
        spans = [rank.free_s - rank.start_s for rank in self.ranks]
        held = max(rank.most_held for rank in self.ranks)
        return _Price(max(spans), max(rank.free_s for rank in self.ranks), held)

    def to_the_end(self) -> None:
        """Runs all ranks until every micro-batch has had its W everywhere."""
        while self.events:
            now_s, index = heapq.heappop(self.events)
            rank = self.ranks[index]
            if now_s < rank.free_s or rank.done[Kind.W] == self.count:
                continue
            kind, later_s = self._choose(rank, now_s)
            if kind is not None:
                self._do(rank, kind, now_s)
            elif later_s is not None:
                heapq.heappush(self.events, (later_s, index))

    def _choose(self, rank: _Rank, now_s: float) -> tuple[Kind | None, float | None]:
        """What a free rank does now; or else when to ask again, if that is known."""
        forward_s, input_s = self._forward_s(rank, now_s), rank.next_input_s(Kind.I)
        may_forward = forward_s is not None and forward_s <= now_s
        may_input = input_s is not None and input_s <= now_s
        after_input = bool(rank.row) and rank.row[-1].kind is not Kind.F
        if may_input and not (may_forward and self.rules.alternates and after_input):
            return Kind.I, None
        if may_forward:
            return Kind.F, None
        later_s = min((s for s in (forward_s, input_s) if s is not None), default=None)
        if rank.done[Kind.W] < rank.done[Kind.I] and self._may_weight(rank, now_s, later_s):
            return Kind.W, None
        return None, later_s

    def _forward_s(self, rank: _Rank, now_s: float) -> float | None:
        """When the next F may start as far as is known: input, memory, and the rules."""
        ready_s = rank.next_input_s(Kind.F)
        if ready_s is None or self._is_full(rank):
            return None
        if rank.done[Kind.I]:
            return ready_s
        first_s = self._first_input_s(rank)
        start_s = max(ready_s, now_s)
        late = start_s < first_s and start_s + self.seconds.forward_s > first_s * _EXACT
        return None if late and not self.rules.fills_first_gap else ready_s

    def _is_full(self, rank: _Rank) -> bool:
        """True if there is no room for one more micro-batch."""
        held = rank.held(self.limit.weight_share)
        return held + 1.0 > self.limit.microbatches * _EXACT

    def _first_input_s(self, rank: _Rank) -> float:
        """When the first I can start at the earliest: through all stages and back."""
        last, s = len(self.ranks) - 1, self.seconds
        there_s = (last + 1) * s.forward_s + last * s.hop_s
        return there_s + (last - rank.stage) * (s.input_s + s.hop_s)

    def _may_weight(self, rank: _Rank, now_s: float, later_s: float | None) -> bool:
        """True if a W is due: nothing else is near, or memory is full."""
        if later_s is None or self.rules.fills_small_gaps or self._is_full(rank):
            return True
        return (later_s - now_s) * _EXACT >= self.seconds.weight_s

    def _do(self, rank: _Rank, kind: Kind, now_s: float) -> None:
        if not rank.row:
            rank.start_s = now_s
        rank.row.append(Action(rank.stage, kind, rank.done[kind]))
        rank.done[kind] += 1
        rank.most_held = max(rank.most_held, rank.held(self.limit.weight_share))
        rank.free_s = now_s + self.seconds.of(kind)
        heapq.heappush(self.events, (rank.free_s, rank.stage))
        is_last = rank.stage == len(self.ranks) - 1
        if kind is Kind.F and is_last:
            rank.arrived_s[Kind.I].append(rank.free_s)
        elif kind is Kind.F:
            self._deliver(rank.stage + 1, Kind.F, rank.free_s + self.seconds.hop_s)
        elif kind is Kind.I and rank.stage:
            self._deliver(rank.stage - 1, Kind.I, rank.free_s + self.seconds.hop_s)

    def _deliver(self, stage: int, kind: Kind, at_s: float) -> None:
        self.ranks[stage].arrived_s[kind].append(at_s)
        heapq.heappush(self.events, (at_s, stage))
