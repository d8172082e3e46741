"""Continuous batching over a paged cache: which tokens the next step computes.

    admit(request) ... plan() -> Step, which a driver runs ... complete(tokens) -> Progress

The scheduler reads no clock and draws no random number: the same calls give the same steps, under
the engine and under the simulator. docs/scheduling.md states its rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triptych.serve.core import admission
from triptych.serve.core.book import Book
from triptych.serve.core.budget import Allowance
from triptych.serve.core.forecast import Forecast, Lately
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.pace import Pace
from triptych.serve.core.planner import Draft, StepPlanner
from triptych.serve.core.request import (
    Admission,
    Finished,
    LatencyClass,
    Progress,
    Reason,
    Refusal,
    Request,
    State,
)
from triptych.serve.core.sequence import Sequence as Continuation
from triptych.serve.core.step import Step

TRUST = 20.0
"""Tokens that answers are assumed to have used, all of those allowed, at first."""

MOST_DOUBT = 0.5
"""Part of an objective that earlier errors may take: the rest is tried, and teaches."""


@dataclass(slots=True)
class Flight:
    """A step that is planned and not completed."""

    step_id: int
    samplers: list[Continuation]
    turns: list[int]  # places of samplers whose answer ends, or whose block is full, with it
    planned_s: float
    num_decodes: int
    prefill_tokens: int
    num_starts: int
    tightest_tpot_s: float
    is_saturated: bool  # it had no room for more


class Load(NamedTuple):
    """How busy a scheduler is."""

    num_waiting: int
    num_running: int
    num_in_flight: int  # steps
    num_free_blocks: int  # those with reusable content included
    num_preemptions: int  # since it was made
    num_reused_tokens: int  # prompt tokens found in the cache, since it was made
    most_running: float  # sequences at once, so that those which run keep their TPOT objectives

    @classmethod
    def idle(cls, limits: Limits) -> Load:
        """Of a scheduler that has seen nothing."""
        return cls(0, 0, 0, limits.num_blocks, 0, 0, limits.max_running)


class Scheduler:
    """Decides for one replica of one model.

    A driver's loop, which engine and simulator share: after each event (a request, an abort, a
    completed step) call `plan` until it returns None, and run the steps in order. At equal times
    completed steps come before requests. With an `allowance` the memory for keys and values is
    shared with other models: what they give back is an event too.
    """

    def __init__(
        self, limits: Limits, policy: Policy | None = None, allowance: Allowance | None = None
    ) -> None:
        self.limits = limits
        self.policy = policy or Policy()
        self.book = Book(limits, allowance)
        self.flights: deque[Flight] = deque()
        self._pace = Pace(limits.token_budget, limits.stages, self.policy.margin)
        self._planner = StepPlanner(self.book, self._pace)
        self._forecast = Forecast()
        self._used = Lately(TRUST)  # tokens of answers, of those that were allowed
        self._next_step = 0
        self._had_room = True  # in the last step, for more prompt tokens
        self._completed_s: deque[float] = deque(maxlen=limits.stages)

    def admit(self, request: Request, now_s: float) -> Admission:
        """Takes a request in, or says why not.

        A request with nothing to generate (`max_tokens` 0, or no limit and a prompt of exactly
        the context limit) is finished at once, for the reason `length`.

        Raises:
            InputError: for a latency class that does not exist.

        """
        assert request.id not in self.book.living, f"request {request.id} lives already"
        latency, order = self.policy.class_of(request), self.policy.order(request)
        end = admission.total_tokens(request, self.limits)
        refusal = admission.unfit(request, self.limits)
        if refusal is None and end == len(request.prompt):
            return Admission(State.FINISHED)
        sequence = Continuation(request, 0, order, end, latency)
        refusal = refusal or self._busy(sequence, latency, now_s)
        if refusal is not None:
            return Admission(State.REFUSED, refusal)
        self._forecast.arrived(self.policy.lead_s(latency), len(request.prompt), now_s)
        self.book.enter(sequence)
        return Admission(State.WAITING)

    def plan(self, now_s: float) -> Step | None:
        """The next step to run, or None if there is nothing to add to those in flight."""
        is_long = self._forecast.step_s >= self.limits.ahead_below_s
        if len(self.flights) >= (self.limits.stages if is_long else self.limits.depth):
            return None
        first = self.flights[0].step_id if self.flights else self._next_step
        horizon = max(self._next_step - self.limits.stages, first - 1)
        draft = Draft(self._next_step, horizon)
        self._planner.fill(draft)
        if not draft.decodes and not draft.chunks:
            return None
        self._next_step += 1
        self._had_room = not draft.is_saturated
        if self.limits.prefix_reuse:  # only now: nobody reads in the step that writes
            for sequence in draft.touched:
                self.book.name_blocks(sequence)
        self.flights.append(self._flight(draft, now_s))
        step = draft.step(self.book.released)
        self.book.released = []
        return step

    def complete(
        self, step_id: int, tokens: Sequence[int], now_s: float, stopped: Collection[int] = ()
    ) -> Progress:
        """Takes in the tokens of the oldest step in flight, in the order of its `samples`.

        Args:
            step_id: of the oldest step in flight.
            tokens: one for each of its samples.
            now_s: seconds on the driver's clock.
            stopped: positions in `tokens` after which the driver wants no more.

        Returns:
            The tokens that somebody waits for, and the continuations that ended. Tokens of
            requests that were ended meanwhile are dropped without a word.

        """
        flight, gone = self.flights.popleft(), State.FINISHED
        samplers, finished = flight.samplers, list[Finished]()
        assert flight.step_id == step_id
        self._observe(flight, now_s)
        for sequence, token in zip(samplers, tokens, strict=True):
            sequence.tokens.append(token)
        answers = [sequence.answer for sequence in samplers if sequence.state is not gone]
        places: Sequence[int] = range(len(samplers))
        if len(answers) < len(samplers):
            places = [place for place in places if samplers[place].state is not gone]
            tokens = [tokens[place] for place in places]
        for place in sorted({*flight.turns, *stopped}) if stopped else flight.turns:
            if samplers[place].state is not gone:
                self._turn(samplers[place], place in stopped, finished, now_s)
        return Progress(answers, tokens, places, finished)

    def abort(self, request_id: int) -> int:
        """Ends all continuations of a request, at any moment; returns how many lived.

        Its slots and blocks are free at once: steps run in order, so those in flight have written
        before any later step does. An unknown id is no error: it has just finished.
        """
        living = list(self.book.living.get(request_id, ()))
        for sequence in living:
            self.book.leave(sequence)
        return len(living)

    def stop(self, request_id: int, continuation: int) -> bool:
        """Ends one continuation, as when its stop text is found late; False if it has ended."""
        for sequence in self.book.living.get(request_id, ()):
            if sequence.index == continuation:
                self.book.leave(sequence)
                return True
        return False

    @property
    def load(self) -> Load:
        """How busy it is now."""
        book = self.book
        return Load(
            len(book.waiting),
            book.num_running,
            len(self.flights),
            book.pool.num_free,
            book.num_preemptions,
            book.num_reused_tokens,
            self.most_running(),
        )

    def most_running(self) -> float:
        """How many sequences may run at once, so that those which do keep their TPOT objectives."""
        return self._planner.most_running()

    def predicted_wait_s(self, request: Request, now_s: float) -> float:
        """Seconds until the first token of a request that arrives now.

        If there is room, the steps in flight and those for its own prompt; else by recent
        throughput, and before any is known, the steps in flight only.
        """
        book, order, size = self.book, self.policy.order(request), len(request.prompt)
        if self._has_room:
            num_own = -(-size // self.limits.token_budget)
            return (len(self.flights) + num_own) * self._forecast.step_s
        ahead = [s for s in (*book.waiting, *book.prefilling) if s.order < order]
        tokens = sum(len(s.tokens) - s.computed for s in ahead) + size
        starts = sum(s.state is not State.RUNNING for s in ahead) + 1
        lead_s = self.policy.lead_s(self.policy.class_of(request))
        return self._forecast.wait_s(tokens, starts, lead_s, len(self.flights), now_s)

    @property
    def _has_room(self) -> bool:
        """Whether a request that arrives now would be in the next step."""
        return self._had_room and not self.book.waiting

    def _busy(self, sequence: Continuation, latency: LatencyClass, now_s: float) -> Refusal | None:
        """Why there is no place for a request; what is foreseen of one in line is kept with it."""
        is_full = len(self.book.waiting) >= self.limits.max_waiting
        if not is_full and not self.policy.refuses_late:
            return None
        request = sequence.request
        wait_s = max(self.predicted_wait_s(request, now_s), self._line_s(sequence))
        if is_full:
            return admission.full(self.limits, wait_s)
        ttft_s = now_s - request.arrival_s + wait_s
        if not self._has_room:
            sequence.foreseen_s = ttft_s
            ttft_s += min(max(0.0, self._forecast.errors.most_s), MOST_DOUBT * latency.ttft_s)
        return admission.late(latency, self.policy.margin, ttft_s)

    def _line_s(self, sequence: Continuation) -> float:
        """Seconds until so many have left that a new sequence may run: it is known who ends when.

        Answers are expected to use the part of what they may that others used of late.
        """
        ahead = [s for s in self.book.waiting if s.order < sequence.order]
        starts = sum(1 + s.num_forks for s in ahead) + 1 + sequence.num_forks
        too_many = self.book.num_running + starts - self._planner.most_running(sequence)
        if too_many <= 0:
            return 0.0
        used, running = self._used.ratio, (*self.book.decoding, *self.book.prefilling)
        left = sorted(max(1.0, used * s.allowed - s.answered) for s in running)
        tokens = left[min(math.ceil(too_many), len(left)) - 1] if left else 0.0
        return tokens * self._pace.token_s(len(running))

    def _flight(self, draft: Draft, now_s: float) -> Flight:
        return Flight(
            draft.id,
            draft.samplers,
            draft.turns,
            now_s,
            len(draft.decodes),
            draft.prefill_tokens,
            len(draft.started),
            draft.tightest_tpot_s,
            draft.is_saturated,
        )

    def _observe(self, flight: Flight, now_s: float) -> None:
        """Learns from how long a step took."""
        times = self._completed_s
        busy_s = now_s - max(flight.planned_s, times[-1] if times else flight.planned_s)
        work = (flight.prefill_tokens, flight.num_starts)
        all_stages_busy = 1 + len(self.flights) >= self.limits.stages
        self._forecast.completed(busy_s, *work, flight.is_saturated and all_stages_busy)
        # The rows of a step waited since the step before in which they were: one for each stage.
        since = times[0] if len(times) == self.limits.stages else flight.planned_s
        waited_s, rows = now_s - max(flight.planned_s, since), (flight.num_decodes, work[0])
        self._pace.note(waited_s, flight.tightest_tpot_s, *rows)
        times.append(now_s)

    def _turn(
        self, sequence: Continuation, stops: bool, finished: list[Finished], now_s: float
    ) -> None:
        """What follows from a token besides its being known: a full block, or the end."""
        num_known, size = len(sequence.tokens), self.limits.block_size
        if num_known == len(sequence.request.prompt) + 1 and not math.isnan(sequence.foreseen_s):
            ttft_s = now_s - sequence.request.arrival_s
            self._forecast.errors.note(sequence.foreseen_s, ttft_s)
        is_running = sequence.state is State.RUNNING
        if self.limits.prefix_reuse and is_running and num_known % size == 1 % size:
            self.book.name_blocks(sequence)
        if stops or num_known == sequence.end:
            self._used.note(sequence.answered, sequence.allowed)
            self.book.leave(sequence)
            reason = Reason.STOP if stops else Reason.LENGTH
            finished.append(Finished(*sequence.answer, reason))
