"""One replica of an LLM: the engine's own scheduler, with predicted durations in place of ranks.

Step j runs on stage s when stage s - 1 is done with it and stage s with step j - 1; it completes
with the last stage. The first stage also waits for step j - stages, whose tokens it may need as
inputs if it was planned ahead. Event order: at equal times completed steps come before requests,
and after each event the scheduler plans until it has nothing to add. The engine keeps the same
loop, so the same trace with the same durations gives the same decisions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from triptych.serve.core.budget import Allowance
from triptych.serve.core.limits import Limits
from triptych.serve.core.order import Policy
from triptych.serve.core.request import Request, State
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.step import Step, Took
from triptych.simulate.line import Line, Planned


class StepShape(NamedTuple):
    """What the duration of a step depends on."""

    num_decodes: int
    decode_context: int  # positions that decodes attend to, all together
    chunks: tuple[tuple[int, int], ...]  # of each: tokens, positions before its first
    num_samples: int

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of all chunks."""
        return sum(tokens for tokens, _ in self.chunks)

    @property
    def prefill_pairs(self) -> float:
        """Pairs of positions that prompt tokens attend over, causally."""
        return sum(n * before + n * (n + 1) / 2 for n, before in self.chunks)


class StepCost(Protocol):
    """Seconds of a step on each pipeline stage, the first stage first."""

    def __call__(self, shape: StepShape) -> Sequence[float]:
        """Seconds, one for each stage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A straight line in the sizes of a step, divided over equal stages.

    Args:
        fixed_s: of any step (weights read, launches, host), on each stage.
        token_s: of each row.
        context_s: of each position that a decode attends to.
        pair_s: of each pair of positions in prefill.
        stages: pipeline stages, each with an equal part of all but the fixed time.

    """

    fixed_s: float
    token_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0
    stages: int = 1

    def __call__(self, shape: StepShape) -> tuple[float, ...]:
        """Seconds, the same for each stage."""
        rows = shape.num_decodes + shape.prefill_tokens
        work_s = rows * self.token_s + shape.decode_context * self.context_s
        work_s += shape.prefill_pairs * self.pair_s
        return (self.fixed_s + work_s / self.stages,) * self.stages


@dataclass(slots=True)
class Record:
    """The life of one request; times in seconds on the simulated clock, NaN where none."""

    request_id: int
    latency_class: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # of the answer that it wants
    state: State = State.WAITING
    first_token_s: float = math.nan
    finish_s: float = math.nan
    num_tokens: int = 0  # got so far

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """A token after the first; 0 for an answer of one token."""
        return (self.finish_s - self.first_token_s) / max(1, self.num_tokens - 1)


# Gets each step that has completed, those to whom it brought a token, and the time.
Observer = Callable[[Took, Sequence[Record], float], None]


class Replica:
    """A scheduler and the line of stages that runs its steps.

    Replicas of several models that are given the same line share its devices, and those that are
    given allowances of one budget the memory for keys and values.
    """

    def __init__(
        self,
        limits: Limits,
        cost: StepCost,
        policy: Policy | None = None,
        line: Line | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits, policy, allowance)
        self.cost = cost
        self.next_s = math.inf  # when its next step completes; infinite if it is idle
        self.busy_s = 0.0  # of the first stage
        self.num_steps = 0
        self.line = line or Line(limits.stages)
        self.observer: Observer | None = None
        self._seat = self.line.join(self)
        self._allowance = allowance
        self._ends_s = deque([0.0] * limits.stages, maxlen=limits.stages)  # of the last steps
        self._running: deque[tuple[float, float, Step]] = deque()  # when it ends, when it began
        self._records: dict[int, Record] = {}

    def submit(self, request: Request, output_tokens: int, now_s: float) -> Record:
        """Hands a request (`n` is 1) to the scheduler; its answer ends after `output_tokens`."""
        record = Record(
            request.id,
            request.latency_class,
            request.arrival_s,
            len(request.prompt),
            output_tokens,
        )
        record.state = self.scheduler.admit(request, now_s).state
        if record.state is State.WAITING:
            self._records[request.id] = record
            self.plan(now_s)
        return record

    def complete(self) -> None:
        """Completes its oldest step, at `next_s`."""
        now_s, began_s, step = self._running.popleft()
        self.next_s = self._running[0][0] if self._running else math.inf
        samplers = self.scheduler.flights[0].samplers
        records, stopped = self._records, set()
        for position, sequence in enumerate(samplers):
            record = records.get(sequence.request.id)
            if record is not None and record.num_tokens + 1 == record.output_tokens:
                stopped.add(position)
        progress = self.scheduler.complete(step.id, [0] * len(samplers), now_s, stopped)
        heard = [records[request_id] for request_id, _ in progress.answers]
        for record in heard:
            if record.num_tokens == 0:
                record.first_token_s, record.state = now_s, State.RUNNING
            record.num_tokens += 1
        for finished in progress.finished:
            record = records.pop(finished.request_id)
            record.finish_s, record.state = now_s, State.FINISHED
        if self.observer is not None:
            prompt_tokens = sum(chunk.num_tokens for chunk in step.chunks)
            took = Took(len(step.decodes), prompt_tokens, now_s - began_s)
            self.observer(took, heard, now_s)
        self.plan(now_s)
        if self._allowance is not None:
            for runner in self.line.runners:
                runner.plan(now_s)

    def plan(self, now_s: float) -> None:
        """Plans all that may be in flight: after each event of its own or of its budget."""
        while (step := self.scheduler.plan(now_s)) is not None:
            self.line.add(self._seat, Planned(now_s, step, self.cost(self._shape(step))))

    def start(self, planned: Planned) -> None:
        """Lets a step take the stages, the first as soon as it may."""
        free_s = self.line.free_s
        at_s = began_s = max(planned.planned_s, self._ends_s[0], free_s[0])
        for stage, duration_s in enumerate(planned.seconds):
            at_s = max(at_s, free_s[stage]) + duration_s
            free_s[stage] = at_s
        self.busy_s += planned.seconds[0]
        self.num_steps += 1
        self._ends_s.append(at_s)
        self._running.append((at_s, began_s, planned.step))
        self.next_s = self._running[0][0]

    def _shape(self, step: Step) -> StepShape:
        num_decodes = len(step.decodes)
        samplers = self.scheduler.flights[-1].samplers
        context = sum(sequence.computed for sequence in samplers[:num_decodes])
        chunks = tuple((chunk.num_tokens, chunk.start) for chunk in step.chunks)
        return StepShape(num_decodes, context, chunks, len(samplers))
