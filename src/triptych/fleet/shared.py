"""LLMs that share groups, simulated: the engine's schedulers, budget, turns and router on predicted
step times.

Each model of a group has a scheduler of its own (`simulate.replica`); they take turns on the
group's stages (`simulate.line`), share its memory for keys and values (`serve.core.budget`), and
requests go where `fleet.router` sends them, which learns here as it does in the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.fleet.router import Place, Router, Ticket, Wanted
from triptych.fleet.terms import Terms
from triptych.serve.core.budget import Budget
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.price import StepPrice, StepTimes
from triptych.serve.core.request import LatencyClass, Refusal, Request, State
from triptych.serve.core.step import Took
from triptych.serve.core.turns import shares
from triptych.simulate.line import Line
from triptych.simulate.replica import Record, Replica, StepCost, StepShape
from triptych.simulate.run import simulate
from triptych.simulate.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A model on a group.

    Args:
        model: its number in traces.
        cost: seconds of its steps on each stage.
        limits: of its scheduler.
        block_bytes: of a block of its keys and values, on the device that has least room.
        price: what the router believes of its steps at first; None: nothing.

    """

    model: int
    cost: StepCost
    limits: Limits
    block_bytes: int = 1
    price: StepPrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroup:
    """Devices that some models share, and their bytes for keys and values; None: no bound."""

    seats: tuple[Seat, ...]
    cache_bytes: int | None = None


class SharedFleet:
    """Groups of some models, as one run simulates them.

    Args:
        groups: which models, at what cost.
        terms: of each model, by its number.
        overhead_s: of each request outside the groups.
        refuses_late: whether what is predicted late is refused.

    """

    def __init__(
        self,
        groups: Sequence[SharedGroup],
        terms: Mapping[int, Terms],
        *,
        overhead_s: float = 0.0,
        refuses_late: bool = True,
    ) -> None:
        self.router = Router(refuses_late=refuses_late)
        self.replicas: list[Replica] = []
        self.steps: list[tuple[int, float, float]] = []  # group, beginning, end in seconds
        self._terms, self._overhead_s = terms, overhead_s
        self._index: dict[Place, int] = {}
        self._tickets: dict[int, Ticket] = {}
        for number, group in enumerate(groups):
            self._add(number, group)

    def run(self, trace: Trace) -> list[Record]:
        """What becomes of each request; ends are those that clients see."""
        models = trace.model.tolist()

        def dispatch(request: Request, _: Sequence[Replica]) -> int | None:
            model = models[request.id]
            if not self.router.serving(str(model)):
                return None
            wanted = Wanted(len(request.prompt), request.max_tokens or 0)
            found = self.router.route(str(model), wanted, request.arrival_s)
            if isinstance(found, Refusal):
                return None
            self._tickets[request.id] = found
            return self._index[found.place]

        records = simulate(trace, self.replicas, dispatch, lambda index: str(models[index]))
        return [self._as_seen(record) for record in records]

    def met(self, record: Record) -> bool:
        """Whether a request kept the objectives of its model."""
        terms = self._terms[int(record.latency_class)]
        if record.state is not State.FINISHED:
            return False
        answer_s = record.finish_s - record.arrival_s
        return terms.met(record.ttft_s, answer_s, record.num_tokens)

    def _as_seen(self, record: Record) -> Record:
        late_s = self._overhead_s
        first_s, finish_s = record.first_token_s + late_s, record.finish_s + late_s
        return replace(record, first_token_s=first_s, finish_s=finish_s)

    def _add(self, number: int, group: SharedGroup) -> None:
        if not group.seats:
            return
        claims = [self._terms[seat.model].claim for seat in group.seats]
        line = Line(group.seats[0].limits.stages, shares(claims))
        budget = None if group.cache_bytes is None else Budget(group.cache_bytes)
        for seat, claim in zip(group.seats, claims, strict=True):
            terms, limits, allowance = self._terms[seat.model], seat.limits, None
            if budget is not None:
                guaranteed = int(claim.guarantee * budget.total_bytes)
                least = limits.blocks(limits.context)
                allowance = budget.join(seat.block_bytes, guaranteed, least)
            replica = Replica(limits, seat.cost, policy_of(str(seat.model), terms), line, allowance)
            place = Place(
                str(seat.model),
                number,
                terms,
                StepTimes(seat.price),
                limits,
                replica.scheduler.most_running,
                self._overhead_s,
            )
            self._index[self.router.add(place)] = len(self.replicas)
            self.replicas.append(replica)
            replica.observer = lambda *seen, place=place: self._seen(place, *seen)

    def _seen(self, place: Place, took: Took, heard: Sequence[Record], now_s: float) -> None:
        place.times.saw(*took)
        self.steps.append((place.group, now_s - took.seconds, now_s))
        seen_s = now_s + self._overhead_s
        for record in heard:
            ticket = self._tickets[record.request_id]
            self.router.heard(ticket, 1, seen_s)
            if record.state is State.FINISHED:
                self.router.ended(ticket, seen_s)
                del self._tickets[record.request_id]


def policy_of(name: str, terms: Terms) -> Policy:
    """How a scheduler orders the requests of one model: those with objectives by their due times.

    Without an objective for the first token a request is due when its answer is.
    """
    first_s = min(terms.ttft_s, terms.answer_s)
    latency = LatencyClass(
        name=name, ttft_s=first_s if math.isfinite(first_s) else 1.0, tpot_s=terms.tpot_s
    )
    return Policy(classes=(latency,))


@dataclass(frozen=True, slots=True)
class RowCost:
    """A price of rows as the simulator takes it: a pipeline's stages have equal parts of it."""

    price: StepPrice
    stages: int = 1

    def __call__(self, shape: StepShape) -> tuple[float, ...]:
        """Seconds, the same for each stage."""
        seconds = self.price.of(1, shape.num_decodes, shape.prefill_tokens)
        return (seconds / self.stages,) * self.stages
