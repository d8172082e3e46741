"""Which group a request goes to, and whether it is refused: one code for engine and simulator.

A request goes to the group that holds its model and would finish it first. That is predicted from
what is still to be done there:

    passes = steps until it may run + those for the prompts that are queued and its own
             + one for each further token
    own    = passes x fixed time + rows of all its model's requests within them x time of a row
    finish = own + of each other model of the group, the lesser of all its work and
             own x (its share / the share of this model)

times how much longer answers have taken of late than was predicted (twice at most). It may run once
so many have left that it has a slot, memory for keys and values, and a place among those that may
run at once under their TPOT objectives. If that breaks an objective it is refused at once; by how
much later than foreseen first tokens came of late is added before. A model's burst so lengthens its
own predictions: others keep their shares. What was slow once must not be refused for ever: on an
idle group nothing is taken for longer than its price, and now and then a request is let in whatever
is foreseen, to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.fleet.terms import Terms
from triptych.serve.core.forecast import Errors, Lately
from triptych.serve.core.limits import Limits
from triptych.serve.core.price import StepPrice, StepTimes
from triptych.serve.core.request import Refusal
from triptych.serve.core.turns import shares

_TRUST = 20.0  # tokens that answers are assumed to have used, all of those allowed, at first
_MOST_CORRECTION = 2.0
_MOST_DOUBT = 0.5  # of an objective
_TRY_S = 5.0  # on an idle group, after so long without a request for a model, one is let in


class Wanted(NamedTuple):
    """What a request asks for: all its prompts and its longest answer."""

    prompt_tokens: int
    max_tokens: int
    num_answers: int = 1


class Foreseen(NamedTuple):
    """Seconds from now."""

    ttft_s: float
    answer_s: float
    work_s: float  # of the group's steps for it, as priced, before any correction


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way at a place: what is still to be done for it."""

    place: Place
    wanted: Wanted
    since_s: float
    foreseen: Foreseen
    prompt_left: float
    output_left: float  # of each answer
    ttft_s: float = math.nan
    num_tokens: int = 0

    @property
    def held(self) -> float:
        """Of its place's memory for keys and values, what it will hold at its end."""
        each = self.output_left + self.num_tokens / self.wanted.num_answers
        return self.place.part_of(self.wanted, each)


@dataclass(slots=True, eq=False)
class Place:
    """A model on a group."""

    model: str
    group: int
    terms: Terms
    times: StepTimes
    limits: Limits
    bound: Callable[[], float] = lambda: math.inf  # sequences that its scheduler runs at once
    overhead_s: float = 0.0  # of a request outside the group's steps
    is_open: bool = True
    last_s: float = -math.inf  # when a request was sent here last
    errors: Errors = field(default_factory=Errors)  # of what was foreseen of first tokens

    @property
    def doubt_s(self) -> float:
        """By how much later than foreseen a first token may come."""
        tightest_s = min(self.terms.ttft_s, self.terms.answer_s)
        return min(max(0.0, self.errors.most_s), _MOST_DOUBT * tightest_s)

    living: dict[int, Ticket] = field(default_factory=dict)  # by `id`

    def part_of(self, wanted: Wanted, tokens: float) -> float:
        """Of the memory for keys and values: what a request holds with answers so long."""
        return (wanted.prompt_tokens + wanted.num_answers * tokens) / self._cache_tokens

    @property
    def held(self) -> float:
        """The part of the memory that the requests which are here will hold."""
        return sum(ticket.held for ticket in self.living.values())

    @property
    def guarantee(self) -> float:
        """The part of the memory that no other model may take: one request at its longest."""
        return max(self.terms.claim.guarantee, self.limits.context / self._cache_tokens)

    @property
    def _cache_tokens(self) -> int:
        return self.limits.num_blocks * self.limits.block_size

    def work_s(self, price: StepPrice) -> float:
        """Seconds of the group until all that is here is done."""
        prompts = sum(ticket.prompt_left for ticket in self.living.values())
        longest = max((t.output_left for t in self.living.values()), default=0.0)
        outputs = sum(t.output_left * t.wanted.num_answers for t in self.living.values())
        return price.of(math.ceil(prompts / self.limits.token_budget) + longest, outputs, prompts)


class Router:
    """Knows every place and what is on its way there; reads no clock.

    Args:
        refuses_late: whether what would miss its objectives is refused.

    """

    def __init__(self, *, refuses_late: bool = True) -> None:
        self.refuses_late = refuses_late
        self.places: list[Place] = []
        self._used: dict[str, Lately] = {}  # tokens of answers, of those that were allowed
        self._late: dict[str, Lately] = {}  # seconds of answers, of those that were predicted

    def add(self, place: Place) -> Place:
        """Opens a place: requests may go there from now on."""
        self.places.append(place)
        self._used.setdefault(place.model, Lately(_TRUST))
        self._late.setdefault(place.model, Lately(1.0))
        return place

    def remove(self, place: Place) -> None:
        """Forgets a place and what was on its way there."""
        self.places.remove(place)

    def serving(self, model: str) -> list[Place]:
        """The places that take requests for a model."""
        return [place for place in self.places if place.model == model and place.is_open]

    def route(self, model: str, wanted: Wanted, now_s: float) -> Ticket | Refusal:
        """The place of a request, or why it is refused.

        There must be an open place. The request counts as on its way until `ended`.
        """
        found = [(self.foresee(place, wanted), place) for place in self.serving(model)]
        foreseen, place = min(found, key=lambda each: each[0].answer_s)
        tokens = self._expected(model, wanted)
        ttft_s, answer_s = (each_s + place.doubt_s for each_s in foreseen[:2])
        late = place.terms.missed(ttft_s, answer_s, tokens)
        if late is not None and self._is_idle(place.group):
            factor = max(1.0, self._correction(model))
            answer_s = place.overhead_s + foreseen.work_s
            late = place.terms.missed(foreseen.ttft_s / factor, answer_s, tokens)
            late = late if now_s - place.last_s < _TRY_S else None
        if late is not None and self.refuses_late:
            words, by_s = late
            return Refusal(f"{words}: as busy as the {len(found)} groups of it are", max(0.1, by_s))
        ticket = Ticket(place, wanted, now_s, foreseen, wanted.prompt_tokens, tokens)
        place.living[id(ticket)] = ticket
        place.last_s = now_s
        return ticket

    def heard(self, ticket: Ticket, num_tokens: int, now_s: float) -> None:
        """Takes in tokens of a request."""
        if math.isnan(ticket.ttft_s):
            ticket.ttft_s = now_s - ticket.since_s
            ticket.prompt_left = 0.0
            ticket.place.errors.note(ticket.foreseen.ttft_s, ticket.ttft_s)
        ticket.num_tokens += num_tokens
        each = num_tokens / ticket.wanted.num_answers
        ticket.output_left = max(1.0, ticket.output_left - each)

    def ended(self, ticket: Ticket, now_s: float, is_whole: bool = True) -> bool:
        """Takes in that a request has ended; whether it kept its objectives.

        Only whole answers teach anything; one that was aborted kept nothing.
        """
        place = ticket.place
        if place.living.pop(id(ticket), None) is None or not is_whole:
            return False
        each = ticket.num_tokens / ticket.wanted.num_answers
        answer_s = now_s - ticket.since_s
        if ticket.wanted.max_tokens:
            self._used[place.model].note(each, ticket.wanted.max_tokens)
            if ticket.foreseen.work_s:
                self._late[place.model].note(answer_s - place.overhead_s, ticket.foreseen.work_s)
        return place.terms.met(ticket.ttft_s, answer_s, each)

    def foresee(self, place: Place, wanted: Wanted) -> Foreseen:
        """When the first and the last token of a request would come, were it sent there now."""
        price, others = place.times.price, self._others(place)
        factor, tokens = self._correction(place.model), self._expected(place.model, wanted)
        queued = sum(t.prompt_left for t in place.living.values()) + wanted.prompt_tokens
        left = sorted(
            t.output_left for t in place.living.values() for _ in range(t.wanted.num_answers)
        )
        prefill = math.ceil(queued / place.limits.token_budget)
        prefill += math.ceil(self._passes_before(place, wanted, tokens))
        ends = []
        for passes, own in ((prefill, 0.0), (prefill + tokens - 1, tokens - 1)):
            rows = sum(min(output, passes) for output in left) + own * wanted.num_answers
            seconds = price.of(passes, rows, queued)
            seconds += sum(min(work_s, ratio * seconds) for work_s, ratio in others)
            ends.append(seconds)
        ttft_s, answer_s = (place.overhead_s + seconds * factor for seconds in ends)
        return Foreseen(ttft_s, answer_s, ends[1])

    def _passes_before(self, place: Place, wanted: Wanted, tokens: float) -> float:
        """Steps until so many have left that a request may run: by number, and by memory."""
        together = [other for other in self.places if other.group == place.group]
        others = sum(max(o.held, o.guarantee) for o in together if o is not place)
        memory = place.part_of(wanted, tokens) + place.held + others - 1.0
        many: float = sum(t.wanted.num_answers for t in place.living.values())
        many += wanted.num_answers - min(place.bound(), place.limits.max_running)
        if memory <= 0 and many <= 0:
            return 0.0
        passes = 0.0
        leaving = [t for other in together for t in other.living.values()]
        for ticket in sorted(leaving, key=lambda t: t.output_left):
            if memory <= 0 and many <= 0:
                break
            passes, memory = ticket.output_left, memory - ticket.held
            many -= ticket.wanted.num_answers if ticket.place is place else 0
        return passes

    def _others(self, place: Place) -> list[tuple[float, float]]:
        """Of each other model of a group: its work in seconds, and its share beside this one's."""
        together = [other for other in self.places if other.group == place.group]
        claimed = dict(zip(together, shares([p.terms.claim for p in together]), strict=True))
        return [
            (other.work_s(other.times.price), claimed[other] / claimed[place])
            for other in together
            if other is not place and other.living
        ]

    def _is_idle(self, group: int) -> bool:
        return not any(place.living for place in self.places if place.group == group)

    def _correction(self, model: str) -> float:
        return min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, self._late[model].ratio))

    def _expected(self, model: str, wanted: Wanted) -> float:
        """Tokens of an answer: of those allowed, the part that answers have used of late."""
        return max(1.0, wanted.max_tokens * self._used[model].ratio)
