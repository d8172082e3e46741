"""Steps as values: small, printable, read back; tables that follow them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.serve.core.check import broken_budget, broken_invariants
from triptych.serve.core.limits import Limits
from triptych.serve.core.request import Request
from triptych.serve.core.scheduler import Scheduler
from triptych.serve.core.step import Append, Chunk, Copy, Fork, Start, Step
from triptych.serve.core.tables import Tables

NUMBER = st.integers(0, 2**40)
NUMBERS = st.lists(NUMBER, max_size=4).map(tuple)


def some(kind: type, *fields: st.SearchStrategy) -> st.SearchStrategy:  # type: ignore[type-arg]
    return st.lists(st.builds(kind, *fields), max_size=3).map(tuple)


STEPS = st.builds(
    Step,
    NUMBER,
    NUMBERS,
    some(Start, NUMBER, NUMBER, NUMBER, NUMBER, NUMBERS, NUMBERS),
    some(Fork, NUMBER, NUMBER, NUMBER, NUMBER),
    some(Append, NUMBER, NUMBER),
    some(Copy, NUMBER, NUMBER, NUMBER, NUMBER),
    NUMBERS,
    some(Chunk, NUMBER, NUMBER, NUMBER, NUMBERS),
)


@given(STEPS)
def test_a_step_is_read_back_from_its_numbers(step: Step) -> None:
    assert Step.from_ints(step.to_ints()) == step


def test_a_step_prints_all_that_changes() -> None:
    step = Step(
        7,
        (4, 5, 6, 9),
        (Start(2, 5, 0, 32, (1,) * 8, (3, 4, 9)),),
        (Fork(2, 3, 5, 1),),
        (Append(0, 11),),
        (Copy(1, 2, 7, 12),),
        (0, 1),
        (Chunk(2, 32, 8, (2, 3)), Chunk(8, 0, 5, ())),
    )
    assert str(step) == (
        "step 7; release 4-6,9; start 2=5.0 +32 of 40 in 3,4,9; fork 2>3=5.1; append 0+11; "
        "copy 1[2] 7>12; decode 0-1; chunk 2 32+8 >2-3; chunk 8 0+5"
    )
    assert step.num_tokens == 15 and step.samples == (0, 1, 2, 3)


def full_house() -> tuple[Scheduler, Tables]:
    limits = Limits(num_blocks=256 * 8, model_context=128, max_running=256, token_budget=2048)
    scheduler, tables = Scheduler(limits), Tables(limits)
    for number in range(256):
        scheduler.admit(Request(id=number, prompt=[number] * 9, max_tokens=100), 0.0)
    while len(scheduler.book.decoding) < 256 or scheduler.book.waiting:
        run(scheduler, tables)
    return scheduler, tables


def run(scheduler: Scheduler, tables: Tables) -> Step:
    step = scheduler.plan(0.0)
    assert step is not None
    tables.apply(step)
    scheduler.complete(step.id, [1] * len(step.samples), 0.0)
    return step


def test_a_step_of_256_decodes_is_small() -> None:
    scheduler, tables = full_house()
    sizes = [len(run(scheduler, tables).to_ints()) for _ in range(48)]
    assert sorted(sizes)[24] < 300 and max(sizes) <= 8 + 3 * 256


def test_tables_are_those_of_the_scheduler() -> None:
    scheduler, tables = full_house()
    for _ in range(50):
        run(scheduler, tables)
        for sequence in scheduler.book.decoding:
            slot, count = sequence.slot, len(sequence.blocks)
            assert tables.blocks[slot, :count].tolist() == sequence.blocks
            assert tables.sizes[slot] == count and tables.lengths[slot] == sequence.computed


def test_rows_say_where_and_what_each_computes() -> None:
    limits = Limits(
        num_blocks=8,
        block_size=4,
        model_context=32,
        max_running=3,
        token_budget=8,
        steps_ahead=0,
        growth_tokens=1,
    )
    scheduler, tables = Scheduler(limits), Tables(limits)
    scheduler.admit(Request(id=0, prompt=[5, 6], max_tokens=9), 0.0)
    run(scheduler, tables)
    scheduler.admit(Request(id=1, prompt=list(range(10, 19)), max_tokens=1, n=2), 0.0)
    for expected in (
        ([0, *range(10, 17)], [2, 0, 1, 2, 3, 4, 5, 6], [0, 1, 8], [0, 1], [3, 7], [0], [0]),
        ([0, 17, 18], [3, 7, 8], [0, 1, 3], [0, 1], [4, 9], [0, 1, 2], [0, 2, 2]),
    ):
        step = scheduler.plan(0.0)
        assert step is not None and broken_budget(scheduler, step) == []
        rows = tables.apply(step)
        tokens, positions, starts, slots, lengths, samples, sample_rows = expected
        assert rows.tokens.tolist() == tokens and rows.positions.tolist() == positions
        assert rows.starts.tolist() == starts and rows.slots.tolist() == slots
        assert rows.lengths.tolist() == lengths and rows.samples.tolist() == samples
        assert rows.sample_rows.tolist() == sample_rows
        owner = np.repeat(rows.slots, np.diff(rows.starts))
        blocks = tables.blocks[owner, rows.positions // 4]
        assert rows.cache.tolist() == (blocks * 4 + rows.positions % 4).tolist()
        scheduler.complete(step.id, [1] * len(step.samples), 0.0)
        assert broken_invariants(scheduler) == []
