"""Hidden states from stage to stage: every slice arrives, and travels once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import make_model

from triptych.errors import PlanError
from triptych.plan.context import sequence_unit
from triptych.plan.plan import Plan, Stage
from triptych.plan.ranks import coordinates, coordinates_in, rank_of, ranks_of
from triptych.plan.short import parse_plan
from triptych.plan.transfer import (
    Piece,
    Spread,
    overlaps,
    pieces,
    pipeline_groups,
    tie_groups,
)
from triptych.schedule.action import COMPUTE, SENDS, Action, Kind
from triptych.schedule.deadlock import find_deadlock
from triptych.schedule.generate import build_program
from triptych.schedule.messages import messages, partner, peer_stage
from triptych.schedule.passes import with_communication
from triptych.schedule.program import Program
from triptych.schedule.traits import SCHEDULES, TRAITS

DEGREES = st.tuples(*[st.integers(1, 4)] * 3)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """Two stages, and the rows and positions of a micro-batch that both can divide."""
    first, second = (draw(DEGREES) for _ in range(2))
    stages = tuple(
        Stage(start=i, stop=i + 1, data=d, tensor=t, context=c)
        for i, (d, t, c) in enumerate((first, second))
    )
    plan = Plan(stages=stages, sequence_parallel=draw(st.booleans()))
    rows = int(np.lcm(first[0], second[0])) * draw(st.integers(1, 3))
    length = sequence_unit(plan) * draw(st.integers(1, 5))
    return plan, rows, length


def held(plan: Plan, pp: int, rows: int, length: int) -> dict[int, list[Piece]]:
    spread = Spread.of(plan, plan.stages[pp])
    return {
        rank: pieces(spread, coordinates(plan, rank), rows, length) for rank in ranks_of(plan, pp)
    }


def local(spread: Spread, whole: np.ndarray, found: list[Piece]) -> np.ndarray:
    """A rank's own tensor with what it answers for; -1 elsewhere."""
    tensor = np.full(spread.local_shape(*whole.shape), -1)
    for piece in found:
        tensor[tuple(slice(*side) for side in piece.local)] = whole[
            tuple(slice(*side) for side in piece.box)
        ]
    return tensor


def at(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in piece.local)


@settings(max_examples=60, deadline=None)
@given(transfers())
def test_every_slice_is_sent_once_and_arrives_where_it_belongs(
    case: tuple[Plan, int, int],
) -> None:
    plan, rows, length = case
    whole = np.arange(rows * length).reshape(rows, length)
    source, target = (held(plan, pp, rows, length) for pp in (0, 1))
    spreads = [Spread.of(plan, stage) for stage in plan.stages]
    sent = 0
    arrived = {rank: np.full(spreads[1].local_shape(rows, length), -1) for rank in target}
    for a, b in product(source, target):
        mine = local(spreads[0], whole, source[a])
        for part in overlaps([p.box for p in source[a]], [p.box for p in target[b]]):
            values = mine[at(source[a][part.source])][part.source_slices]
            arrived[b][at(target[b][part.target])][part.target_slices] = values
            sent += values.size
    assert sent == whole.size
    for rank, tensor in arrived.items():
        np.testing.assert_array_equal(tensor, local(spreads[1], whole, target[rank]))


@settings(max_examples=50, deadline=None)
@given(transfers())
def test_tensor_ranks_answer_for_all_that_they_hold_in_equal_shares(
    case: tuple[Plan, int, int],
) -> None:
    plan, rows, length = case
    whole = np.arange(rows * length).reshape(rows, length)
    stage, spread = plan.stages[0], Spread.of(plan, plan.stages[0])
    groups: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, found in held(plan, 0, rows, length).items():
        place = coordinates(plan, rank)
        groups.setdefault((place.cp, place.dp), []).append(local(spread, whole, found))
    for parts in groups.values():
        filled = sum((part >= 0).astype(int) for part in parts)
        counts = [int((part >= 0).sum()) for part in parts]
        if spread.is_split:
            assert all((part >= 0).all() for part in parts)
        else:
            assert (filled == 1).all() and max(counts) == -(-sum(counts) // stage.tensor)


def test_ranks_follow_the_degrees_or_the_devices_of_their_stages() -> None:
    stages = (Stage(start=0, stop=1, tensor=2), Stage(start=1, stop=2, data=3, context=2))
    plan = Plan(stages=stages)
    assert [coordinates(plan, rank) for rank in (1, 2, 3, 7)] == [
        (1, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 1),
        (0, 1, 2, 1),
    ]
    listed = Plan(
        stages=(
            Stage(start=0, stop=1, tensor=2, devices=(1, 3)),
            Stage(start=1, stop=2, data=2, devices=(0, 2)),
        )
    )
    assert coordinates(listed, 3) == (1, 0, 0, 0) and coordinates(listed, 2) == (0, 0, 1, 1)
    for each in (plan, listed):
        for rank in range(each.world_size):
            assert rank_of(each, coordinates(each, rank)) == rank


def test_messages_connect_columns_or_all_ranks() -> None:
    assert pipeline_groups(Plan.uniform(2, pp=2, tp=2)) == [(0, 2), (1, 3)]
    assert tie_groups(Plan.uniform(2, pp=2, tp=2)) == [(0, 2), (1, 3)]
    assert tie_groups(Plan.uniform(4, pp=2, chunks=2, schedule="zb-v")) == []
    own = Plan(stages=(Stage(start=0, stop=1, tensor=2), Stage(start=1, stop=2, data=2)))
    assert pipeline_groups(own) == tie_groups(own) == [(0, 1, 2, 3)]


def test_a_micro_batch_that_a_stage_cannot_divide_is_refused_with_what_works() -> None:
    with pytest.raises(PlanError, match="multiples of 2 sequences and of 4 tokens"):
        pieces(Spread(2, 2, 1, False), coordinates(Plan.uniform(1), 0), 3, 8)


@settings(max_examples=50, deadline=None)
@given(transfers())
def test_not_even_blocking_calls_wait_in_a_circle(case: tuple[Plan, int, int]) -> None:
    """Each rank calls its peers in the order of their ranks, and waits for each."""
    plan, rows, length = case
    ends = [held(plan, pp, rows, length) for pp in (0, 1)]
    calls: dict[int, deque[int]] = {rank: deque() for rank in range(plan.world_size)}
    for mine, theirs in (ends, ends[::-1]):
        for a, b in product(mine, theirs):
            if overlaps([p.box for p in mine[a]], [p.box for p in theirs[b]]):
                calls[a].append(b)
    moved = True
    while moved:
        moved = False
        for rank, queue in calls.items():
            while queue and calls[queue[0]] and calls[queue[0]][0] == rank:
                calls[queue[0]].popleft()
                queue.popleft()
                moved = True
    assert not any(calls.values())


def test_the_coordinates_of_a_stage_follow_the_order_of_ranks() -> None:
    plan = Plan(stages=(Stage(start=0, stop=1, tensor=2, context=2, data=2),))
    found = [coordinates_in(plan, 0, index)[:3] for index in range(4)]
    assert found == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]


# ---- whole programs, rank by rank --------------------------------------------------------------


class Rank:
    """A rank that issues batches of messages in the order of its row, one queue a direction."""

    def __init__(self, row: tuple[Action, ...]) -> None:
        self.row, self.position = row, 0
        self.queues: dict[tuple[bool, bool], deque[Action]] = {}
        self.complete: set[Action] = set()


def all_end(plan: Plan, program: Program) -> bool:
    """Runs a program as NCCL would: no message is buffered, and a batch holds up its queue."""
    peers = {}
    for a, b in [(s, s + 1) for s in range(program.num_stages - 1)]:
        ends = [held(plan, program.placement[stage], 12, 24) for stage in (a, b)]
        for x, y in product(*ends):
            if overlaps([p.box for p in ends[0][x]], [p.box for p in ends[1][y]]):
                peers.setdefault((x, a, b), []).append(y)
                peers.setdefault((y, b, a), []).append(x)
    ranks = [Rank(program.actions[coordinates(plan, r).pp]) for r in range(plan.world_size)]
    met: set[tuple[int, Action, int]] = set()

    def queue(rank: int, action: Action) -> deque[Action]:
        stages = (action.stage, peer_stage(action))
        source, target = stages if action.kind in SENDS else stages[::-1]
        up = program.placement[source] < program.placement[target]
        key = (action.kind in (Kind.SEND_F, Kind.RECV_F), up)
        return ranks[rank].queues.setdefault(key, deque())

    def step(rank: int) -> bool:
        """Issues what can be issued; completes the batches at the heads of the queues."""
        moved, own = False, ranks[rank]
        while own.position < len(own.row):
            action = own.row[own.position]
            needed = messages(program, action)[0] if action.kind in COMPUTE else None
            if needed is not None and needed not in own.complete:
                break
            if action.kind not in COMPUTE:
                queue(rank, action).append(action)
            own.position += 1
            moved = True
        for waiting in own.queues.values():
            while waiting:
                action = waiting[0]
                others = peers[rank, action.stage, peer_stage(action)]
                for other in others:
                    theirs = queue(other, partner(action))
                    if theirs and theirs[0] == partner(action):
                        met.add((rank, action, other))
                        met.add((other, partner(action), rank))
                if not all((rank, action, other) in met for other in others):
                    break
                own.complete.add(waiting.popleft())
                moved = True
        return moved

    while any([step(rank) for rank in range(plan.world_size)]):
        pass
    return all(r.position == len(r.row) and not any(r.queues.values()) for r in ranks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_between_stages_with_other_degrees(schedule: str) -> None:
    model, chunks = make_model(layers=12, kv_heads=8), TRAITS[schedule].least_chunks
    for degrees in ("tp=2+1,dp=1+2", "tp=1+3+1,dp=3+1+2", "cp=2+1+1,dp=1+4+1,tp=1+1+2,sp=1"):
        plan = parse_plan(f"{degrees},schedule={schedule},chunks={chunks},microbatch=4", model)
        program = with_communication(build_program(schedule, plan.pp, 7, chunks))
        assert find_deadlock(program) == {}
        assert all_end(plan, program)


def test_a_program_that_waits_in_a_circle_does_not_end() -> None:
    plan = parse_plan("tp=2+1,dp=1+2,microbatch=2", make_model())
    program = with_communication(build_program("1f1b", 2, 2, 1))
    late, early = (a for a in program.actions[0] if a.kind is Kind.SEND_F)
    swapped = tuple({late: early, early: late}.get(a, a) for a in program.actions[0])
    assert not all_end(plan, replace(program, actions=(swapped, program.actions[1])))
