"""Makespans, bubbles, memory and programs of the literature, and their closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from schedule_samples import legal_sizes, unit

from triptych.schedule.action import Action, Kind
from triptych.schedule.generate import Durations, Memory, build_program, zero_bubble_program
from triptych.schedule.program import Program
from triptych.schedule.simulate import peak_held, peak_in_flight, simulate
from triptych.schedule.timeline import Timeline

# name, chunks, p, m -> makespan, F=1, B=2, I=W=1 over all chunks of a rank
MAKESPANS = [
    ("gpipe", 1, 4, 8, 33.0),
    ("1f1b", 1, 4, 8, 33.0),
    ("interleaved", 2, 4, 8, 28.5),
    ("interleaved", 4, 4, 8, 26.25),
    ("breadth-first", 2, 4, 8, 28.5),
    ("zb-h1", 1, 4, 8, 27.0),
    ("zb-h2", 1, 4, 8, 27.0),
    ("zb-v", 2, 4, 8, 25.5),
    ("gpipe", 1, 4, 4, 21.0),
    ("1f1b", 1, 4, 4, 21.0),
    ("interleaved", 2, 4, 4, 16.5),
    ("zb-h1", 1, 4, 4, 15.0),
    ("1f1b", 1, 2, 4, 15.0),
    ("interleaved", 2, 2, 4, 13.5),
    ("zb-h1", 1, 2, 4, 13.0),
    ("1f1b", 1, 8, 24, 93.0),
    ("interleaved", 2, 8, 24, 82.5),
    ("zb-h1", 1, 8, 24, 79.0),
]

# name, chunks -> from forward to (input) backward, and to the end of the whole backward; p=4, m=8
PEAKS = [
    ("gpipe", 1, (8, 8, 8, 8), (8, 8, 8, 8)),
    ("1f1b", 1, (4, 3, 2, 1), (4, 3, 2, 1)),
    ("interleaved", 2, (11, 9, 7, 5), (11, 9, 7, 5)),
    ("interleaved", 4, (19, 17, 15, 13), (19, 17, 15, 13)),
    ("breadth-first", 2, (16, 16, 16, 16), (16, 16, 16, 16)),
    ("zb-h1", 1, (4, 3, 2, 1), (4, 4, 4, 4)),
    ("zb-h2", 1, (7, 5, 3, 1), (7, 7, 7, 7)),
    ("zb-v", 2, (8, 8, 8, 8), (8, 8, 8, 8)),
    ("dualpipe-v", 2, (9, 9, 9, 9), (9, 9, 9, 9)),
]


def timeline(name: str, p: int, m: int, chunks: int = 1) -> Timeline:
    return simulate(build_program(name, p, m, chunks), unit(chunks))


@pytest.mark.parametrize(("name", "chunks", "p", "m", "makespan_s"), MAKESPANS)
def test_makespan_and_idle_time_of_the_worked_examples(
    name: str, chunks: int, p: int, m: int, makespan_s: float
) -> None:
    made = timeline(name, p, m, chunks)
    assert made.makespan_s == pytest.approx(makespan_s, rel=1e-12)
    for rank in range(p):
        assert made.makespan_s - made.busy_s(rank) == pytest.approx(makespan_s - 3 * m, abs=1e-9)
    assert made.bubble_over_ideal == pytest.approx(makespan_s / (3 * m) - 1, abs=1e-12)
    assert made.bubble_fraction == pytest.approx(1 - 3 * m / makespan_s, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks", "rate"),
    [
        ("1f1b", 1, 3 / 11),
        ("interleaved", 2, 3 / 19),
        ("interleaved", 4, 3 / 35),
        ("zb-h1", 1, 1 / 9),
    ],
)
def test_bubble_rates_of_the_worked_examples(name: str, chunks: int, rate: float) -> None:
    assert timeline(name, 4, 8, chunks).bubble_fraction == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("name", "chunks"), [("zb-h2", 1), ("zb-v", 2), ("zb-auto", 1)])
def test_no_rank_idles_between_its_first_and_its_last_action(name: str, chunks: int) -> None:
    assert timeline(name, 4, 8, chunks).longest_span_s == pytest.approx(24, rel=1e-12)


@pytest.mark.parametrize(("name", "chunks", "in_flight", "held"), PEAKS)
def test_peaks_of_the_worked_examples(
    name: str, chunks: int, in_flight: tuple[int, ...], held: tuple[int, ...]
) -> None:
    program = build_program(name, 4, 8, chunks)
    assert peak_in_flight(program) == in_flight
    assert peak_held(program) == held


# --- DualPipe-V ---------------------------------------------------------------------------------


def pairs(p: int, m: int, rank: int) -> list[tuple[Action, ...]]:
    """DualPipe-V's row with the F and B that GPUs run at the same time as one entry each."""
    row = list(build_program("dualpipe-v", p, m, 2).actions[rank])
    before, turn = p - rank - 1, rank + 1
    sizes = [1] * (2 * before + 2 * turn + 3 * before)
    main = [2, 2] * (m - 2 * p + turn)
    if rank == p - 1:
        main[:1] = [1, 1]
    sizes += main + [1, 2] * before
    sizes += [1] * (len(row) - sum(sizes))
    entries = []
    for size in sizes:
        entries.append(tuple(row[:size]))
        del row[:size]
    return entries


def idle_with_pairs(p: int, m: int, pair_s: float) -> list[float]:
    """Idle seconds of each rank where a pair is one action: F=1, B=2, I=W=1 a chunk."""
    seconds = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    rows = [pairs(p, m, rank) for rank in range(p)]
    ends: dict[Action, float] = {}
    now, at, busy = [0.0] * p, [0] * p, [0.0] * p

    def needs(action: Action) -> list[Action]:
        step = -1 if action.kind is Kind.F else 1
        peer, index = action.stage + step, action.microbatch
        if action.kind is Kind.W or not 0 <= peer < 2 * p:
            return []
        kinds = [Kind.F] if action.kind is Kind.F else [Kind.B, Kind.I]
        return [Action(peer, kind, index) for kind in kinds]

    def ready(entry: Sequence[Action]) -> float | None:
        wanted = [[n for n in needs(a) if n in ends] for a in entry if needs(a)]
        return max((ends[n[0]] for n in wanted), default=0.0) if all(wanted) else None

    while any(at[rank] < len(rows[rank]) for rank in range(p)):
        for rank in range(p):
            while at[rank] < len(rows[rank]):
                entry = rows[rank][at[rank]]
                ready_s = ready(entry)
                if ready_s is None:
                    break
                long_s = pair_s if len(entry) == 2 else seconds[entry[0].kind]
                now[rank] = max(now[rank], ready_s) + long_s
                busy[rank] += long_s
                ends.update(dict.fromkeys(entry, now[rank]))
                at[rank] += 1
    return [max(now) - worked for worked in busy]


def test_dualpipe_v_of_the_worked_example_where_pairs_gain_nothing() -> None:
    # Chunk units of the worked example are half of these: makespan 27, idle 3.
    assert idle_with_pairs(4, 8, 3.0) == [6.0] * 4


@pytest.mark.parametrize(("p", "idle_s"), [(4, 6.0), (8, 14.0)])
def test_dualpipe_v_idles_as_its_authors_say(p: int, idle_s: float) -> None:
    # (PP/2-1)(F&B + B - 3W) with PP = 2p stages, F&B = 3, B = 2, W = 1.
    assert max(idle_with_pairs(p, 20, 3.0)) == idle_s == (p - 1) * 2


def test_dualpipe_v_idles_as_its_authors_say_where_pairs_gain() -> None:
    assert max(idle_with_pairs(4, 20, 2.5)) == 4.5 == (4 - 1) * (2.5 + 2 - 3)


# --- programs -----------------------------------------------------------------------------------


def row(program: Program, rank: int) -> str:
    return " ".join(str(action).removeprefix(str(rank)) for action in program.actions[rank])


def looped_row(program: Program, rank: int) -> str:
    """Actions as kind, micro-batch, chunk: `F0.1`."""
    return " ".join(
        f"{a.kind}{a.microbatch}.{a.stage // program.num_ranks}" for a in program.actions[rank]
    )


def test_interleaved_first_rank_of_4_with_8_microbatches_and_2_chunks() -> None:
    assert looped_row(build_program("interleaved", 4, 8, 2), 0) == (
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 "
        "F6.1 B0.0 F7.1 B1.0 B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0"
    )


def test_zb_h1_second_rank_of_4_with_8_microbatches() -> None:
    assert row(build_program("zb-h1", 4, 8), 1).replace("1I", "1B").replace("I", "B") == (
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7"
    )


def test_zb_h2_second_rank_of_4_with_8_microbatches() -> None:
    assert row(build_program("zb-h2", 4, 8), 1).replace("I", "B") == (
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7"
    )


# --- closed forms -------------------------------------------------------------------------------


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for p, m, v in legal_sizes("interleaved", range(2, 9), (8, 15, 24)):
        if m % p == 0:
            assert timeline("interleaved", p, m, v).makespan_s == pytest.approx(
                3 * m + (p - 1) * 3 / v, rel=1e-12
            )


def test_breadth_first_divides_the_bubble_by_the_chunks() -> None:
    for p, m, v in legal_sizes("breadth-first", range(2, 9), (8, 15, 24)):
        assert timeline("breadth-first", p, m, v).makespan_s == pytest.approx(
            3 * m + (p - 1) * 3 / v, rel=1e-12
        )


def test_interleaved_holds_the_published_number_of_chunks() -> None:
    # (v-1)p + 2(p-1-r) + 1 where p divides m (Narayanan et al. 2021; domain.md section 4).
    for p, m, v in legal_sizes("interleaved", range(2, 7), (12, 24, 60)):
        if m % p == 0 and m > 2 * p:
            expected = tuple((v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p))
            assert peak_in_flight(build_program("interleaved", p, m, v)) == expected


def seconds_of(forward_s: float, input_s: float, weight_s: float):
    table = {Kind.F: forward_s, Kind.I: input_s, Kind.W: weight_s, Kind.B: input_s + weight_s}
    return lambda action: table[action.kind]


UNEQUAL = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.3, 1.4, 0.7)]


@pytest.mark.parametrize("seconds", UNEQUAL)
def test_zb_h1_has_the_published_bubble(seconds: tuple[float, float, float]) -> None:
    forward_s, input_s, weight_s = seconds
    for p, m in ((2, 4), (4, 8), (4, 20), (7, 21)):
        made = simulate(build_program("zb-h1", p, m), seconds_of(*seconds))
        bubble_s = (p - 1) * (forward_s + input_s - weight_s)
        assert made.longest_span_s == pytest.approx(m * sum(seconds) + bubble_s, rel=1e-12)


@pytest.mark.parametrize("seconds", UNEQUAL)
def test_zb_h2_has_the_published_bubble(seconds: tuple[float, float, float]) -> None:
    forward_s, input_s, weight_s = seconds
    for p, m in ((2, 4), (4, 8), (4, 20), (7, 21)):
        made = simulate(build_program("zb-h2", p, m), seconds_of(*seconds))
        bubble_s = (p - 1) * (forward_s + input_s - 2 * weight_s)
        assert made.longest_span_s == pytest.approx(m * sum(seconds) + bubble_s, rel=1e-12)


def test_zb_h1_and_h2_hold_the_published_memory() -> None:
    # Worker i: (p-i+1) M_B + (i-1) M_W, and (2p-2i+1) M_B + (2i-2) M_W (Qi et al. 2024, sec. 2.3).
    for p in range(2, 8):
        h1, h2 = build_program("zb-h1", p, 3 * p), build_program("zb-h2", p, 3 * p)
        for rank in range(p):
            assert peak_held(h1, weight_share=0.4)[rank] == pytest.approx(p - rank + 0.4 * rank)
            assert peak_held(h2, weight_share=0.4)[rank] == pytest.approx(
                2 * (p - rank) - 1 + 0.8 * rank
            )


def test_zb_v_has_no_bubble_and_the_memory_of_1f1b() -> None:
    for p in range(1, 9):
        for m in (2 * p, 2 * p + 3, 32):
            program = build_program("zb-v", p, m, 2)
            assert simulate(program, unit(2)).longest_span_s == pytest.approx(3 * m, rel=1e-12)
            assert peak_held(program) == (2 * p,) * p


# --- bubble rates of Qi et al. 2024, table 5 -----------------------------------------------------

# p, m, (F, I, W, message) in milliseconds, M_W / M_B -> 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
TABLE_5 = [
    (8, 32, (18.513, 18.086, 9.331, 0.626), 0.368, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 0.368, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 0.432, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), 0.432, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.432, (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    pytest.param(
        *(16, 128, (11.325, 11.308, 8.109, 0.378), 0.432),
        (0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("p", "m", "times", "weight_share", "published"), TABLE_5)
def test_bubble_rates_with_measured_times_are_those_published(
    p: int,
    m: int,
    times: tuple[float, float, float, float],
    weight_share: float,
    published: tuple[float, ...],
) -> None:
    forward_s, input_s, weight_s, hop_s = times
    durations = Durations(forward_s=forward_s, input_s=input_s, weight_s=weight_s, hop_s=hop_s)
    programs = [build_program(name, p, m) for name in ("1f1b", "zb-h1", "zb-h2")]
    for microbatches in (p, 2 * p):
        memory = Memory(microbatches=microbatches, weight_share=weight_share)
        programs.append(zero_bubble_program(p, m, memory=memory, durations=durations))
    for program, rate in zip(programs, published, strict=True):
        made = simulate(program, seconds_of(forward_s, input_s, weight_s), lambda _: hop_s)
        busy_s = m * (forward_s + input_s + weight_s)
        assert 1 - busy_s / made.longest_span_s == pytest.approx(rate, abs=6e-5), program.name
