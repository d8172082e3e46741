"""Clipping without a barrier: the optimizer goes ahead of the norm and is validated afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import DOUBLE, batch_of, make_engine, split, strictly, tiny_config
from ranks import STRICT, run_ranks

from triptych.plan.plan import Plan
from triptych.runtime.engine import Engine
from triptych.schedule.action import Kind
from triptych.schedule.traits import TRAITS

STEPS = 4
CONFIG = tiny_config(tie_word_embeddings=True)


def _plan(schedule: str, **settings: Any) -> Plan:
    chunks = TRAITS[schedule].least_chunks
    return Plan.uniform(4, pp=2, schedule=schedule, chunks=chunks, precision=DOUBLE, **settings)


def _steps(engine: Engine, count: int = STEPS) -> tuple[list[float], list[float]]:
    results = []
    for step in range(count):
        strictly(step)
        rows = split(batch_of(step, 8, 16, 512), engine.plan, engine.mesh.coordinates)
        results.append(engine.step(rows, 1e-2))
    engine.settle()
    return [r.loss for r in results], [r.grad_norm for r in results]


def _run(plan: Plan, clip_norm: float, is_late: bool) -> dict[str, Any]:
    """Losses, norms and state after a few steps, and what was taken back and left out on a rank."""
    engine = make_engine(plan, CONFIG, clip_norm=clip_norm, eps=1e-2)
    assert engine.validates_late
    counts = {"put_back": 0, "step": 0, "step_ahead": 0}
    for name in counts:
        _count(engine.optimizer, name, counts)
    if not is_late:
        engine._late = None
    losses, norms = _steps(engine)
    shards = {(s.kind, s.name, s.box): s.tensor.clone().numpy() for s in engine.shards()}
    held = [float(count) for state in engine.optimizer.states for count in state.steps]
    return {"losses": losses, "norms": norms, "shards": shards, "counts": counts, "held": held}


def _count(optimizer: Any, name: str, counts: dict[str, int]) -> None:
    whole = getattr(optimizer, name)

    def counting(*args: Any) -> Any:
        counts[name] += 1
        return whole(*args)

    setattr(optimizer, name, counting)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "plan",
    [
        _plan("zb-h2", microbatch=2),
        _plan("zb-v", dp=2, zero=1, microbatch=1),
        _plan("zb-v", dp=2, zero=3, recompute="full"),
    ],
    ids=Plan.short,
)
def test_a_late_validation_equals_a_barrier(plan: Plan) -> None:
    """Bit by bit, whether nothing, some or all of the steps are clipped."""
    for rank in run_ranks(plan.world_size, _both, plan):
        nothing, some, always = (late["counts"] for late, _ in rank)
        assert nothing == {"step_ahead": STEPS, "put_back": 0, "step": 0}
        assert some["put_back"] > 0
        assert always == {"step_ahead": 1, "put_back": 1, "step": STEPS}
        for late, barrier in rank:
            assert barrier["counts"] == {"step_ahead": 0, "put_back": 0, "step": STEPS}
            assert late["held"] == barrier["held"] == [STEPS] * len(late["held"])
            assert (late["losses"], late["norms"]) == (barrier["losses"], barrier["norms"])
            assert late["shards"].keys() == barrier["shards"].keys()
            for key, values in barrier["shards"].items():
                assert (late["shards"][key] == values).all(), key


def _both(plan: Plan) -> list[list[dict[str, Any]]]:
    """Late and with a barrier: nothing is clipped, the largest norm is, all are."""
    norms = sorted(_run(plan, 0.0, False)["norms"])
    limits = (2 * norms[-1], (norms[-1] + norms[-2]) / 2, norms[0] / 100)
    return [[_run(plan, limit, is_late) for is_late in (True, False)] for limit in limits]


def test_a_step_that_is_not_finite_is_put_back_on_every_rank() -> None:
    plan = _plan("zb-v", dp=2)

    def body() -> Any:
        engine = make_engine(plan, CONFIG, clip_norm=1e9, eps=1e-2)
        _steps(engine, 1)
        before = [s.tensor.clone() for s in engine.shards()]
        if engine.mesh.coordinates.pp == 1:  # an infinity that the first rank does not have
            finish = engine.buckets.finish

            def finish_with_an_infinity() -> None:
                finish()
                engine.optimizer.pieces[0].gradient[0] = torch.inf

            engine.buckets.finish = finish_with_an_infinity  # type: ignore[method-assign]
        _, norms = _steps(engine, 1)
        after = [s.tensor for s in engine.shards()]
        are_equal = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        steps = {float(count) for state in engine.optimizer.states for count in state.steps}
        return norms, are_equal, steps

    for norms, are_equal, steps in run_ranks(4, body):
        assert norms == [float("inf")] and are_equal and steps == {1.0}


@pytest.mark.skipif(STRICT, reason="strict communication compares calls at once: a barrier")
@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_the_first_rank_begins_its_next_step_before_the_last_one_knows_its_norm(
    schedule: str, tmp_path: Path
) -> None:
    """With a barrier the last rank would wait for a sign that only the first can give then."""
    plan, sign = _plan(schedule), tmp_path / "first rank is in step 2"

    def body() -> bool:
        engine = make_engine(plan, CONFIG)
        if engine.mesh.rank == 0:
            whole = engine._interpreter._forward
            calls = []

            def forward(*args: Any) -> None:
                whole(*args)
                calls.append(args)
                if len(calls) == plan.chunks * 8 + 1:
                    sign.touch()

            engine._interpreter._do[Kind.F] = forward
        else:
            norm = engine.optimizer.squared_norm

            def waits() -> torch.Tensor:
                while not sign.exists():
                    time.sleep(0.01)
                return norm()

            engine.optimizer.squared_norm = waits  # type: ignore[method-assign]
        return bool(_steps(engine, 2)) and sign.exists()

    assert run_ranks(2, body) == [True, True]
