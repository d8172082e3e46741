"""The best of many options, exactly, without simulating them all.

Every option has a bound that its step time does not undercut, cheap to compute and nearly always
tight. Options are taken in the order of their bounds and simulated; one whose time is not above
the next bound is final.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import cached_property

from triptych.plan.plan import Plan
from triptych.search.options import Option
from triptych.search.space import Degrees

Order = tuple[object, ...]


class Contender:
    """An option whose step time is simulated when it is first asked for."""

    def __init__(self, option: Option, base: Plan, runs: Callable[[Plan], bool]) -> None:
        self.option = option
        self._base = base
        self._runs = runs

    @cached_property
    def plan(self) -> Plan:
        """The plan of the option."""
        return self.option.plan(self._base)

    @cached_property
    def runnable(self) -> bool:
        """True if the plan runs today."""
        return self._runs(self.plan)

    @cached_property
    def step_s(self) -> float:
        """The simulated step time, to nine digits: what is nearer together is equal."""
        return rounded(self.option.step_s())

    @cached_property
    def order(self) -> Order:
        """What ranks it: time; then what runs today, less memory, and the simpler plan.

        Simpler: fewer pipeline, tensor, context and expert ranks, a lower ZeRO stage, nothing
        recomputed, no sequence parallelism, a ring, a smaller micro-batch; last, the layers of the
        stages.
        """
        degrees, setting = self.option.degrees, self.option.frame.settings[0]
        return (
            self.step_s,
            not self.runnable,
            rounded(self.option.peak_bytes),
            (degrees.pp, degrees.tp, degrees.cp, degrees.ep, self.option.storage.zero),
            (setting.recompute != "none", setting.recompute, setting.sequence_parallel),
            setting.context_method,
            (setting.microbatch, self.option.schedule != "1f1b", self.option.schedule),
            tuple(stage.num_layers for stage in self.option.frame.stages),
        )


def rounded(value: float) -> float:
    """A value to nine significant digits."""
    return float(f"{value:.9g}")


def best(contenders: Iterable[Contender], count: int) -> list[Contender]:
    """The first `count` in order, simulating only those whose bound could still be among them."""
    heap: list[tuple[float, bool, Order, int, Contender]] = [
        (rounded(c.option.bound_s), False, (), index, c) for index, c in enumerate(contenders)
    ]
    heapq.heapify(heap)
    final: list[Contender] = []
    while heap and len(final) < count:
        _, is_simulated, _, index, contender = heapq.heappop(heap)
        if is_simulated:
            final.append(contender)
        else:
            heapq.heappush(heap, (contender.step_s, True, contender.order, index, contender))
    return final


def ranked(contenders: list[Contender], count: int) -> list[Contender]:
    """The best plan of each set of degrees, then, if that leaves room, the next best of all."""
    leaders = _leaders(contenders, count)
    if len(leaders) < count:
        chosen = set(map(id, leaders))
        rest = (c for c in contenders if id(c) not in chosen)
        leaders += best(rest, count - len(leaders))
    return sorted(leaders, key=lambda contender: contender.order)


def _leaders(contenders: list[Contender], count: int) -> list[Contender]:
    """The best contender of each set of degrees, best sets first."""
    families: dict[Degrees, list[Contender]] = {}
    for contender in contenders:
        families.setdefault(contender.option.degrees, []).append(contender)
    heap: list[tuple[float, bool, Order, int, list[Contender]]] = [
        (min(rounded(c.option.bound_s) for c in members), False, (), index, members)
        for index, members in enumerate(families.values())
    ]
    heapq.heapify(heap)
    final: list[Contender] = []
    while heap and len(final) < count:
        _, is_simulated, _, index, members = heapq.heappop(heap)
        if is_simulated:
            final += members
        else:
            (leader,) = best(members, 1)
            heapq.heappush(heap, (leader.step_s, True, leader.order, index, [leader]))
    return final
