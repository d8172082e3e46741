"""A clock that skips periods ends when the program does that is simulated action by action."""

from __future__ import annotations

import random

import pytest
from cost_samples import cluster, llama, work

from triptych.cost.clock import in_order_ends_s, rank_ends_s
from triptych.cost.pipeline import Pair
from triptych.cost.pricer import Pricer
from triptych.cost.tape import WORK, whole_tape
from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import build_program
from triptych.schedule.program import Program
from triptych.schedule.simulate import simulate
from triptych.schedule.traits import TRAITS

SIZES = [(1, 9), (2, 5), (2, 23), (3, 21), (4, 18), (4, 32), (5, 34), (6, 47)]
PERIODIC = [name for name in TRAITS if name != "zb-auto"]


def simulated_s(
    program: Program, stages: list[Pair], halves: list[Pair], hop_s: float
) -> list[float]:
    def duration(action: Action) -> float:
        (forward_s, backward_s), (input_s, weight_s) = stages[action.stage], halves[action.stage]
        kinds = {Kind.F: forward_s, Kind.B: backward_s, Kind.I: input_s, Kind.W: weight_s}
        return kinds[action.kind]

    ends_s = [0.0] * program.num_ranks
    for span in simulate(program, duration, lambda _: hop_s).spans:
        ends_s[span.rank] = max(ends_s[span.rank], span.end_s)
    return ends_s


def drawn(rng: random.Random, num_stages: int) -> tuple[list[Pair], list[Pair]]:
    """Seconds of stages and of halves: of random stages, or of equal ones."""
    ranges = (0.5, 2.0) if rng.random() < 0.6 else (1.0, 1.0)
    stages = [(rng.uniform(*ranges), 2 * rng.uniform(*ranges)) for _ in range(num_stages)]
    return stages, [(b * rng.uniform(0.4, 0.6), b * rng.uniform(0.4, 0.6)) for _, b in stages]


@pytest.mark.parametrize("name", PERIODIC)
def test_periods_that_are_skipped_end_as_those_that_are_run(name: str) -> None:
    rng, traits, pricer = random.Random(name), TRAITS[name], Pricer(llama(), cluster(), work())
    for ranks, count in SIZES:
        for chunks in range(traits.least_chunks, min(traits.most_chunks or 3, 3) + 1):
            if not traits.allows(ranks, count, chunks):
                continue
            program = build_program(name, ranks, count, chunks)
            tape, whole = pricer.tape(name, ranks, count, chunks), whole_tape(program)
            assert [tape.tally(kind) for kind in WORK] == [whole.tally(kind) for kind in WORK]
            for hop_s in (0.0, 0.3, 1.7):
                stages, halves = drawn(rng, program.num_stages)
                expected = simulated_s(program, stages, halves, hop_s)
                found = rank_ends_s(tape, stages, hop_s, halves)
                assert found == pytest.approx(expected, rel=1e-10)
                if traits.runs_in_order:
                    closed = in_order_ends_s(stages, program.placement, count, hop_s)
                    assert closed == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_a_longer_program_has_no_longer_tape(name: str) -> None:
    pricer, chunks = Pricer(llama(), cluster(), work()), TRAITS[name].least_chunks
    short, long = (pricer.tape(name, 4, count, chunks) for count in (64, 4096))
    assert short.before is long.before and short.period is long.period
    assert long.repeats - short.repeats == 4032 // (4 if name == "interleaved" else 1)
