"""The best of very many plans, exactly: best-first branch and bound.

Sets of plans, single plans and simulated plans wait in one heap, in the order of what they take at
least. A set that comes first is opened, a plan is simulated; a simulated plan that comes first is
final, since nothing that waits can undercut it (Land and Doig 1960). What still waits at the end
was never looked into, and is counted under the name of its bound.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from triptych.cost.pricer import Pricer
from triptych.search.branches import Branch, Shape, branches, shapes, within
from triptych.search.objective import Objective
from triptych.search.options import FIT, Option, rounded
from triptych.search.space import Degrees, Space

NO_MEMORY = "memory: state and one micro-batch in flight"
NO_MEMORY_PRICED = "memory: peak of the largest rank"
SLOWER = {
    Branch: "{}: work and state shared evenly by the pipeline ranks",
    Shape: "{}: work and waits of these stages under any schedule",
    Option: "{}: closed form of the schedule",
}
"""Names of the bounds by which plans are passed over; `{}` is the objective."""

Node = Branch | Shape | Option
Entry = tuple[float, bool, tuple[object, ...], int, Node]
"""What a node takes at least (or takes: True), what breaks ties, when it came, the node."""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What became of every legal plan."""

    bounds: Counter[str] = field(default_factory=Counter)
    simulated: int = 0

    @property
    def too_large(self) -> int:
        """Plans that do not fit in memory."""
        return self.bounds[NO_MEMORY] + self.bounds[NO_MEMORY_PRICED]

    @property
    def plans(self) -> int:
        """All of them."""
        return self.bounds.total() + self.simulated


class BestFirst:
    """A search over a space for the least of an objective among plans that fit.

    They need at most `limit_bytes`; by default the memory of a device with the space's spare.
    """

    def __init__(
        self,
        space: Space,
        pricer: Pricer,
        objective: Objective,
        runs: Callable[[Option], bool],
        limit_bytes: float | None = None,
    ) -> None:
        self.space, self.pricer, self.objective = space, pricer, objective
        self.ledger = Ledger()
        self._runs = runs
        self._limit_bytes = FIT * (
            space.room_bytes(pricer.memory_limit_bytes) if limit_bytes is None else limit_bytes
        )
        self._ticket = count()
        self._heap: list[Entry] = []
        for branch in branches(space, pricer):
            fitting = within(branch, self._limit_bytes)
            self.ledger.bounds[NO_MEMORY] += branch.num_plans - fitting.num_plans
            if fitting.num_plans:
                self._push(objective.bound(fitting.bound), False, (), fitting)

    def leaders(self, top: int) -> list[Option]:
        """The best plan of each of the best `top` sets of degrees, best first.

        If there are fewer sets, the next best plans fill up.
        """
        leaders: dict[Degrees, Option] = {}
        later: list[Entry] = []
        while self._heap and len(leaders) < top:
            entry = heapq.heappop(self._heap)
            _, is_final, _, _, node = entry
            if node.degrees in leaders:
                later.append(entry)
            elif is_final and isinstance(node, Option):
                leaders[node.degrees] = node
            else:
                self._open(node)
        chosen = list(leaders.values())
        self._heap = sorted([*self._heap, *later])
        if len(chosen) < top:
            chosen += self.next_best(top - len(chosen))
        return sorted(chosen, key=self._order)

    def next_best(self, number: int) -> list[Option]:
        """The next plans in order."""
        chosen: list[Option] = []
        while self._heap and len(chosen) < number:
            _, is_final, _, _, node = heapq.heappop(self._heap)
            if is_final and isinstance(node, Option):
                chosen.append(node)
            else:
                self._open(node)
        return chosen

    def close(self) -> Ledger:
        """What became of every plan until now: what waits is passed over by its bound."""
        bounds = self.ledger.bounds.copy()
        for _, is_final, _, _, node in self._heap:
            if not is_final:
                bounds[SLOWER[type(node)].format(self.objective.name)] += _plans(node)
        return Ledger(bounds=bounds, simulated=self.ledger.simulated)

    def front(self, leaders: list[Option], slower: float) -> list[Option]:
        """Plans than which none is both faster and smaller, fastest first; for the objective time.

        Up to `slower` times the step time of the first of the `leaders` of this search.
        """
        for leader in leaders:
            self._push(self.objective.value(leader), True, self._order(leader), leader)
        front: list[Option] = []
        least_bytes = float("inf")
        until_s = slower * leaders[0].step_s if leaders else 0.0
        while self._heap and self._heap[0][0] <= until_s:
            _, is_final, _, _, node = heapq.heappop(self._heap)
            if _least_bytes(node) >= least_bytes:
                continue
            if is_final and isinstance(node, Option):
                front.append(node)
                least_bytes = rounded(node.peak_bytes)
            else:
                self._open(node)
        return front

    # --- nodes -----------------------------------------------------------------------------------

    def _push(self, key: float, is_final: bool, order: tuple[object, ...], node: Node) -> None:
        heapq.heappush(self._heap, (rounded(key), is_final, order, next(self._ticket), node))

    def _open(self, node: Node) -> None:
        if isinstance(node, Branch):
            for shape in shapes(self.space, self.pricer, node):
                fitting = shape.within(self._limit_bytes)
                self.ledger.bounds[NO_MEMORY_PRICED] += shape.num_plans - fitting.num_plans
                if fitting.num_plans:
                    self._push(self.objective.bound(fitting.bound), False, (), fitting)
        elif isinstance(node, Shape):
            for option in self._fitting(node):
                self._push(self.objective.option_bound(option), False, (), option)
        elif node.peak_bytes > self._limit_bytes:
            self.ledger.bounds[NO_MEMORY_PRICED] += 1
        else:
            self.ledger.simulated += 1
            self._push(self.objective.value(node), True, self._order(node), node)

    def _fitting(self, shape: Shape) -> Iterator[Option]:
        """The plans of a shape that may fit."""
        frame = shape.frame
        works = [(schedule, frame.least_work(schedule)) for schedule in shape.schedules]
        for divided in shape.divided():
            for schedule, work in works:
                if frame.peak_bytes(divided.state, work) > self._limit_bytes:
                    self.ledger.bounds[NO_MEMORY_PRICED] += 1
                else:
                    yield shape.option(divided, schedule)

    def _order(self, option: Option) -> tuple[object, ...]:
        """What ranks a plan: the objective; then what runs today, and the simpler plan."""
        return (*self.objective.order(option), not self._runs(option), option.simplicity)


def _least_bytes(node: Node) -> float:
    """What a node needs at least, a plan whose program is there exactly."""
    if not isinstance(node, Option):
        return (
            node.bound.memory_bytes if isinstance(node, Branch) else node.branch.bound.memory_bytes
        )
    return rounded(max(node.least_peak_bytes, node.peak_bytes if "step_s" in vars(node) else 0.0))


def _plans(node: Node) -> int:
    return 1 if isinstance(node, Option) else node.num_plans
