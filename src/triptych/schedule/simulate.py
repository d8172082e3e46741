"""When does each action of a program run, given how long each takes?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from triptych.errors import Problem, ScheduleError
from triptych.schedule.action import Action, Kind
from triptych.schedule.excerpt import excerpt
from triptych.schedule.messages import source_stage, target_stage, without_communication
from triptych.schedule.program import Program
from triptych.schedule.timeline import Span, Timeline

# What a compute action waits for: (is a forward, the stage that needs it, micro-batch).
_Input = tuple[bool, int, int]


def simulate(
    program: Program,
    duration: Callable[[Action], float],
    transfer: Callable[[Action], float] | None = None,
) -> Timeline:
    """The timeline in which every compute action starts as early as it can.

    F of a stage follows F of the stage before, its backward the backward of the stage after,
    each by the time of the message; actions of a rank run one after the other, in order. Sends and
    receives in the program take no time of their own: a message travels while its rank computes.

    Args:
        program: with or without sends and receives.
        duration: seconds of a compute action.
        transfer: seconds from the end of a compute action until its output is on the next rank;
            called with the compute action that produces the message (absent: 0). Not called
            between stages on the same rank.

    Raises:
        ScheduleError: with a table of the waiting ranks, if the program never ends.

    """
    bare = without_communication(program)
    run = _Simulation(bare, duration, transfer or _at_once)
    run.to_the_end()
    if run.waiting:
        raise ScheduleError(_stuck(bare, run))
    return Timeline(tuple(sorted(run.spans, key=_by_start)), program.num_ranks)


def _at_once(_: Action) -> float:
    return 0.0


def _by_start(span: Span) -> tuple[float, int]:
    return span.start_s, span.rank


class _Simulation:
    """Clocks and positions of the ranks; `waiting` maps a missing input to the rank it holds."""

    def __init__(
        self,
        program: Program,
        duration: Callable[[Action], float],
        transfer: Callable[[Action], float],
    ) -> None:
        self.program = program
        self.duration = duration
        self.transfer = transfer
        self.clock_s = [0.0] * program.num_ranks
        self.position = [0] * program.num_ranks
        self.arrival_s: dict[_Input, float] = {}
        self.waiting: dict[_Input, int] = {}
        self.spans: list[Span] = []

    def to_the_end(self) -> None:
        """Runs until every rank has ended or waits for an input that never comes."""
        runnable = list(range(self.program.num_ranks))
        while runnable:
            rank = runnable.pop()
            row = self.program.actions[rank]
            while self.position[rank] < len(row):
                action = row[self.position[rank]]
                needed = self._input(action)
                if needed is not None and needed not in self.arrival_s:
                    self.waiting[needed] = rank
                    break
                produced = self._execute(rank, action, needed)
                self.position[rank] += 1
                if produced in self.waiting:
                    runnable.append(self.waiting.pop(produced))

    def _input(self, action: Action) -> _Input | None:
        if source_stage(self.program, action) is None:
            return None
        return action.kind is Kind.F, action.stage, action.microbatch

    def _execute(self, rank: int, action: Action, needed: _Input | None) -> _Input | None:
        """Runs one action; the input of another stage that it produces, if any."""
        start_s = max(self.clock_s[rank], self.arrival_s[needed] if needed else 0.0)
        end_s = start_s + self.duration(action)
        self.clock_s[rank] = end_s
        self.spans.append(Span(rank, str(action), start_s, end_s))
        target = target_stage(self.program, action)
        if target is None:
            return None
        travels = self.program.placement[target] != rank
        produced = (action.kind is Kind.F, target, action.microbatch)
        self.arrival_s[produced] = end_s + (self.transfer(action) if travels else 0.0)
        return produced


def _stuck(program: Program, run: _Simulation) -> Problem:
    arrows = {}
    for (is_forward, stage, index), rank in run.waiting.items():
        source = f"{stage - 1}F{index}" if is_forward else f"the backward {stage + 1}B{index}"
        arrows[rank] = (run.position[rank], f"waits for {source}")
    shown = excerpt(program, arrows).replace("\n", "\n    ")
    return Problem(f"the program never ends\n    {shown}", "no rank waits for a later action")


def peak_in_flight(program: Program) -> tuple[int, ...]:
    """For each rank, the most (micro-batch, stage) pairs whose forward is done and backward is not.

    A split backward ends at its input-gradient half.
    """
    return tuple(round(held) for held in peak_held(program, weight_share=0.0))


def peak_held(program: Program, *, weight_share: float = 1.0) -> tuple[float, ...]:
    """As `peak_in_flight`, with `weight_share` of each pair that waits for its W after its I.

    1: from forward to the end of the whole backward (Qi et al. 2024: M_W / M_B, sec. 2.3).
    """
    change = {
        Kind.F: 1.0,
        Kind.B: -1.0,
        Kind.I: weight_share - 1.0,
        Kind.W: -weight_share,
    }
    return tuple(
        max(accumulate((change.get(a.kind, 0.0) for a in row), initial=0.0))
        for row in program.actions
    )
