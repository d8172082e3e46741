"""Closed forms of the pipeline against the simulation of the very program."""

from __future__ import annotations

import random

import pytest

from triptych.cost.clock import rank_ends_s
from triptych.cost.pipeline import (
    Pair,
    enough_microbatches,
    known_peaks,
    makespan_bound_s,
    program_peaks,
    rank_bounds_s,
)
from triptych.cost.tape import whole_tape
from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import SCHEDULES, build_program
from triptych.schedule.program import Program
from triptych.schedule.simulate import simulate
from triptych.schedule.timeline import Timeline
from triptych.schedule.traits import TRAITS

SIZES = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 4), (4, 9), (5, 3), (6, 20)]


def simulated(schedule: str, stages: list[Pair], count: int, hop_s: float = 0.0) -> Timeline:
    def duration(action: Action) -> float:
        return stages[action.stage][0 if action.kind is Kind.F else 1]

    program = build_program(schedule, len(stages), count)
    return simulate(program, duration, lambda _: hop_s)


def simulated_s(schedule: str, stages: list[Pair], count: int, hop_s: float = 0.0) -> float:
    return simulated(schedule, stages, count, hop_s).makespan_s


def random_stages(rng: random.Random, count: int) -> list[Pair]:
    return [(rng.uniform(0.5, 2.0), rng.uniform(1.0, 4.0)) for _ in range(count)]


@pytest.mark.parametrize("hop_s", [0.0, 0.3])
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_gpipe_s_closed_form_is_exact(ranks: int, count: int, hop_s: float) -> None:
    rng = random.Random(ranks * 100 + count)
    stages = random_stages(rng, ranks)
    expected = simulated_s("gpipe", stages, count, hop_s)
    assert makespan_bound_s("gpipe", stages, count, hop_s) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_equal_stages_take_m_plus_p_minus_one_rounds(schedule: str, ranks: int, count: int) -> None:
    stages = [(1.0, 2.0)] * ranks
    expected = (count + ranks - 1) * 3.0
    assert makespan_bound_s(schedule, stages, count) == pytest.approx(expected)
    assert simulated_s(schedule, stages, count) == pytest.approx(expected)


def test_no_simulation_undercuts_the_bound_of_1f1b() -> None:
    rng = random.Random(0)
    for _ in range(300):
        stages = random_stages(rng, rng.randint(1, 6))
        count, hop_s = rng.randint(1, 12), rng.choice([0.0, rng.random()])
        bound_s = makespan_bound_s("1f1b", stages, count, hop_s)
        assert bound_s <= simulated_s("1f1b", stages, count, hop_s) * (1 + 1e-12)


def test_the_bound_of_1f1b_is_tight_when_one_stage_is_heavier() -> None:
    stages = [(1.0, 2.0)] * 3 + [(1.4, 2.5)]
    assert makespan_bound_s("1f1b", stages, 16) == pytest.approx(
        simulated_s("1f1b", stages, 16), rel=1e-12
    )


@pytest.mark.parametrize("hop_s", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_the_clock_of_searches_is_that_of_the_simulation(
    schedule: str, ranks: int, count: int, hop_s: float
) -> None:
    stages = random_stages(random.Random(count), ranks)
    program = build_program(schedule, ranks, count)
    ends_s = rank_ends_s(whole_tape(program), stages, hop_s)
    timeline = simulated(schedule, stages, count, hop_s)
    for rank in range(ranks):
        last_s = max(span.end_s for span in timeline.spans if span.rank == rank)
        assert ends_s[rank] == pytest.approx(last_s, rel=1e-12)


def test_a_split_backward_takes_its_two_halves() -> None:
    rows = [[(0, "F"), (0, "I"), (0, "W")], [(1, "F"), (1, "I"), (1, "W")]]
    program = Program(
        name="split",
        placement=(0, 1),
        num_microbatches=1,
        actions=tuple(tuple(Action(stage, Kind(kind), 0) for stage, kind in row) for row in rows),
    )
    assert rank_ends_s(whole_tape(program), [(1.0, 2.0)] * 2, 0.5) == [
        1 + 0.5 + 1 + 1 + 0.5 + 2,
        4.5,
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first"])
@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_known_peaks_are_those_of_the_program(schedule: str, ranks: int, count: int) -> None:
    for chunks in range(1, 4):
        if TRAITS[schedule].allows_chunks(chunks):
            program = build_program(schedule, ranks, count, chunks)
            assert known_peaks(schedule, ranks, count, chunks) == program_peaks(program)


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"gpipe", "1f1b", "breadth-first"}))
def test_more_micro_batches_than_enough_show_no_other_peaks(schedule: str) -> None:
    chunks = TRAITS[schedule].least_chunks
    for ranks, count in ((1, 7), (2, 9), (2, 16), (3, 13), (3, 30), (4, 17), (4, 40), (5, 25)):
        enough = enough_microbatches(schedule, ranks, count)
        whole, part = (
            program_peaks(build_program(schedule, ranks, number, chunks))
            for number in (count, enough)
        )
        assert [set(moments) for moments in whole] == [set(moments) for moments in part]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_moment_of_a_program_needs_more_than_its_peaks(schedule: str) -> None:
    rng = random.Random(3)
    traits = TRAITS[schedule]
    program = build_program(schedule, 4, 9, traits.least_chunks)
    weights = [(rng.random(), rng.random()) for _ in range(program.num_stages)]
    for rank, moments in enumerate(program_peaks(program)):
        stages = program.stages_of(rank)
        found = max(
            sum(
                alive.in_flight * weights[stage][0] + alive.deferred * weights[stage][1]
                for stage, alive in zip(stages, moment, strict=True)
            )
            for moment in moments
        )
        now = most = 0.0
        for action in program.actions[rank]:
            saved, deferred = weights[action.stage]
            change = {Kind.F: saved, Kind.B: -saved, Kind.I: deferred - saved, Kind.W: -deferred}
            now += change[action.kind]
            most = max(most, now)
        assert found == pytest.approx(most, rel=1e-9)


@pytest.mark.parametrize("hop_s", [0.0, 0.3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_clocked_as_it_is_simulated_and_never_beats_its_bound(
    schedule: str, hop_s: float
) -> None:
    rng = random.Random(7)
    for ranks, count in ((1, 3), (2, 5), (4, 9), (4, 16)):
        program = build_program(schedule, ranks, count, TRAITS[schedule].least_chunks)
        stages = random_stages(rng, program.num_stages)
        shares = [rng.uniform(0.3, 0.8) for _ in stages]
        halves = [
            (b * share, b * (1.1 - share)) for (_, b), share in zip(stages, shares, strict=True)
        ]

        def duration(
            action: Action, stages: list[Pair] = stages, halves: list[Pair] = halves
        ) -> float:
            (forward_s, backward_s), (input_s, weight_s) = (
                stages[action.stage],
                halves[action.stage],
            )
            kinds = {Kind.F: forward_s, Kind.B: backward_s, Kind.I: input_s, Kind.W: weight_s}
            return kinds[action.kind]

        timeline = simulate(program, duration, lambda _: hop_s)
        ends_s = rank_ends_s(whole_tape(program), stages, hop_s, halves)
        bounds_s = rank_bounds_s(stages, program.placement, count, hop_s)
        for rank in range(ranks):
            last_s = max(span.end_s for span in timeline.spans if span.rank == rank)
            assert ends_s[rank] == pytest.approx(last_s, rel=1e-12)
            assert bounds_s[rank] <= last_s * (1 + 1e-12)
