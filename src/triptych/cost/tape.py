"""A program as one list of steps, each after what it needs; what repeats itself is there once.

After a few micro-batches most schedules run the same actions for each further micro-batch (each
further p of them under interleaved 1F1B). A tape has the steps before, those of one period, and
those after, so that a clock need not walk through every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import build_program
from triptych.schedule.program import Program
from triptych.schedule.traits import TRAITS

Step = tuple[int, int, int, int]
"""Pipeline rank; 4 x stage + place in `WORK`; the slot of its input; the slot of its output."""

WORK = (Kind.F, Kind.B, Kind.I, Kind.W)
NOTHING, NOBODY = 0, 1
"""The slot of what waits for nothing, and of what nobody waits for."""

_PLACE = {kind: place for place, kind in enumerate(WORK)}
_Input = tuple[bool, int, int]  # is it of a forward, the stage and the micro-batch that need it
_Span = tuple[int, int]
Build = Callable[[int], Program]


class Tape(NamedTuple):
    """Steps of a program; before another period, each of `targets` takes over from `sources`."""

    placement: tuple[int, ...]
    num_slots: int
    before: list[Step]
    period: list[Step]
    repeats: int
    after: list[Step]
    targets: list[int]
    sources: list[int]

    def tally(self, kind: Kind) -> list[int]:
        """Actions of a kind, by stage."""
        counts = [0] * len(self.placement)
        for steps, times in ((self.before, 1), (self.period, self.repeats), (self.after, 1)):
            for _, work, _, _ in steps:
                counts[work // 4] += times * (work % 4 == _PLACE[kind])
        return counts


def period_of(name: str, num_ranks: int) -> tuple[int, int]:
    """With how many micro-batches a schedule has its first whole period, and how many are in it.

    0 in it: the schedule has none.
    """
    if name == "zb-auto":
        return 0, 0
    least = num_ranks if name in ("1f1b", "zb-h1") else 2 * num_ranks
    return least, num_ranks if name == "interleaved" else 1


def tape_of(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Tape:
    """The tape of a schedule, with the period of its last micro-batches if it shows one."""

    def build(count: int) -> Program:
        return build_program(name, num_ranks, count, chunks)

    least, each = period_of(name, num_ranks)
    base = num_microbatches - each
    is_long = each > 0 and base >= least and TRAITS[name].allows(num_ranks, base, chunks)
    short = short_tape(build, base, each) if is_long else None
    return short or whole_tape(build(num_microbatches))


def whole_tape(program: Program) -> Tape:
    """The tape of a program in which nothing repeats itself."""
    order = _Order(program)
    steps = list(order.until([len(row) for row in program.actions]))
    return Tape(program.placement, len(order.slots) + 2, steps, [], 0, [], [], [])


def short_tape(build: Build, base: int, each: int) -> Tape | None:
    """The tape of `build(base + each)`, whose last micro-batches are a period that may be repeated.

    None if programs of these sizes show no such period.
    """
    program = build(base + each)
    spans = [
        _added(row, longer, each)
        for row, longer in zip(build(base).actions, program.actions, strict=True)
    ]
    found = [span for span in spans if span]
    return _cut(program, found, each) if len(found) == len(spans) else None


def _added(row: Sequence[Action], longer: Sequence[Action], each: int) -> _Span | None:
    """Where a longer program has more actions than a shorter one: what follows is the same, of
    later micro-batches. None if there is no such place.
    """
    pairs = zip(row, longer, strict=False)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    stop = start + len(longer) - len(row)
    later = tuple(Action(a.stage, a.kind, a.microbatch + each) for a in row[start:])
    return (start, stop) if later == tuple(longer[stop:]) else None


def _cut(program: Program, spans: Sequence[_Span], each: int) -> Tape | None:
    """A program in three parts, with what waits in front of its period and behind it."""
    order = _Order(program)
    before = list(order.until([start for start, _ in spans]))
    waiting = set(order.made)
    period = list(order.until([stop for _, stop in spans]))
    is_cut = order.position == [stop for _, stop in spans]
    later = {key: (key[0], key[1], key[2] + each) for key in waiting}
    if not is_cut or order.made != set(later.values()):
        return None
    after = list(order.until([len(row) for row in program.actions]))
    return Tape(
        placement=program.placement,
        num_slots=len(order.slots) + 2,
        before=before,
        period=period,
        repeats=1,
        after=after,
        targets=[order.slots[key] for key in later],
        sources=[order.slots[key] for key in later.values()],
    )


class _Order:
    """Steps of a program in an order in which each comes after what it waits for.

    `made` are the inputs that are there and not yet used.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = [0] * program.num_ranks
        self.slots: dict[_Input, int] = {}
        self.made: set[_Input] = set()

    def until(self, stops: Sequence[int]) -> Iterator[Step]:
        """The steps until each rank is at its stop, or waits for what comes later."""
        waiting: dict[_Input, int] = {}
        runnable = list(range(self.program.num_ranks))
        while runnable:
            rank = runnable.pop()
            row = self.program.actions[rank]
            while self.position[rank] < stops[rank]:
                action = row[self.position[rank]]
                needed, produced = self._ends(action)
                if needed is not None and needed not in self.made:
                    waiting[needed] = rank
                    break
                yield self._step(rank, action, needed, produced)
                if produced in waiting:
                    runnable.append(waiting.pop(produced))

    def _step(self, rank: int, action: Action, needed: _Input | None, made: _Input | None) -> Step:
        self.position[rank] += 1
        if needed is not None:
            self.made.remove(needed)
        if made is not None:
            self.made.add(made)
        work = 4 * action.stage + _PLACE[action.kind]
        return rank, work, self._slot(needed, NOTHING), self._slot(made, NOBODY)

    def _slot(self, key: _Input | None, otherwise: int) -> int:
        return otherwise if key is None else self.slots.setdefault(key, len(self.slots) + 2)

    def _ends(self, action: Action) -> tuple[_Input | None, _Input | None]:
        """What an action waits for and what it produces for another stage."""
        stage, index, last = action.stage, action.microbatch, self.program.num_stages - 1
        if action.kind is Kind.W:
            return None, None
        if action.kind is Kind.F:
            needed = (True, stage, index) if stage else None
            return needed, (True, stage + 1, index) if stage < last else None
        needed = (False, stage, index) if stage < last else None
        return needed, (False, stage - 1, index) if stage else None
