"""Precision: gradients travel in the dtype that the plan names; fp16 with dynamic loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import batch_of, make_engine, split, tiny_config
from ranks import run_ranks

from triptych.plan.plan import Plan, Precision
from triptych.runtime.engine import Engine
from triptych.runtime.scaling import GROWTH_STEPS, LEAST, LossScale, read

CONFIG = tiny_config(num_hidden_layers=2)
FP16 = Precision(parameter="fp16")


def _microbatches(engine: Engine, step: int = 0) -> Any:
    rows = batch_of(step, 4, 16, CONFIG["vocab_size"])
    return split(rows, engine.plan, engine.mesh.coordinates)


def _weights(engine: Engine) -> list[torch.Tensor]:
    return [shard.tensor.clone() for shard in engine.shards()]


# ---- reduction --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2},
        {"dp": 2, "zero": 1, "microbatch": 2},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 2, "accumulation": "reduce_last"},
        {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3, "hybrid_shard": 1},
    ],
    ids=str,
)
def test_gradients_are_reduced_in_the_dtype_of_the_plan(settings: dict[str, Any]) -> None:
    """bf16 on the wire gives bf16's rounding, of fp32 sums kept in fp32, and half the bytes."""

    def body(plan: Plan) -> None:
        exact, rounded = (
            make_engine(plan.with_(precision=Precision(reduction=word)), CONFIG)
            for word in ("fp32", "bf16")
        )
        for engine in (exact, rounded):
            engine.mesh.counters.reset()
            engine.gradients(_microbatches(engine))
        pairs = list(zip(exact.optimizer.pieces, rounded.optimizer.pieces, strict=True))
        for one, other in pairs:
            assert other.gradient.dtype == torch.float32
            scale = float(one.gradient.abs().max())
            torch.testing.assert_close(other.gradient, one.gradient, rtol=2e-2, atol=2e-2 * scale)
        assert not all(torch.equal(one.gradient, other.gradient) for one, other in pairs)
        sent, half = (e.mesh.counters.by_axis["data"].bytes_sent for e in (exact, rounded))
        gathered = 0.5 if plan.zero < 3 or plan.hybrid_shard == 1 else 0.85
        assert half < gathered * sent + 1000

    plan = Plan.uniform(2, **settings)
    run_ranks(plan.world_size, body, plan)


def test_gradients_kept_in_bf16_can_be_summed_in_fp32() -> None:
    def body(plan: Plan) -> None:
        engine = make_engine(plan, CONFIG)
        engine.gradients(_microbatches(engine))
        assert {piece.gradient.dtype for piece in engine.optimizer.pieces} == {torch.bfloat16}
        assert engine.dtypes()["reduction"] == "fp32"

    precision = Precision(parameter="bf16", gradient="bf16", reduction="fp32")
    run_ranks(2, body, Plan.uniform(2, dp=2, zero=2, precision=precision))


# ---- fp16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
        {"dp": 2, "zero": 1, "offload": "optimizer"},
    ],
    ids=str,
)
def test_fp16_follows_fp32_and_skips_steps_that_overflow(settings: dict[str, Any]) -> None:
    def body(plan: Plan) -> list[float]:
        engine = make_engine(plan.with_(precision=FP16), CONFIG)
        wide = make_engine(plan, CONFIG)
        scale = engine.loss_scale
        assert scale is not None and wide.loss_scale is None
        for step in range(3):
            result, exact = (e.step(_microbatches(e, step), 1e-3) for e in (engine, wide))
            assert result.loss == pytest.approx(exact.loss, rel=2e-3)
            assert result.grad_norm == pytest.approx(exact.grad_norm, rel=2e-2)
            assert result.scaling == (2.0**16, 0, False) and exact.scaling is None
        scale.value.fill_(2.0**40)
        before = _weights(engine)
        seen = []
        for skipped in (1, 2):
            result = engine.step(_microbatches(engine, 3), 1e-3)
            assert result.scaling == (2.0 ** (40 - skipped), skipped, True)
            assert torch.isfinite(torch.tensor(result.loss))
            seen.append(result.loss)
        assert all(map(torch.equal, before, _weights(engine)))
        scale.value.fill_(2.0**10)
        assert engine.step(_microbatches(engine, 3), 1e-3).scaling == (2.0**10, 2, False)
        assert not all(map(torch.equal, before, _weights(engine)))
        assert engine.differing_replicas() == []
        return seen

    plan = Plan.uniform(2, **settings)
    losses = run_ranks(plan.world_size, body, plan)
    assert all(loss == losses[0] for loss in losses)


def test_a_resumed_run_goes_on_with_its_scale() -> None:
    def body(plan: Plan) -> None:
        first, second = make_engine(plan, CONFIG), make_engine(plan, CONFIG)
        assert first.loss_scale is not None and second.loss_scale is not None
        first.loss_scale.value.fill_(2.0**40)
        for _ in range(2):
            first.step(_microbatches(first), 1e-3)
        first.loss_scale.value.fill_(2.0**12)
        first.step(_microbatches(first), 1e-3)
        for mine, theirs in zip(second.shards(), first.shards(), strict=True):
            mine.tensor.copy_(theirs.tensor)
        state = first.training_state()
        assert state["scaling"]["skipped_steps"] == 2
        second.after_load(3, state)
        results = [engine.step(_microbatches(engine, 4), 1e-3) for engine in (first, second)]
        assert results[0].scaling == results[1].scaling == (2.0**12, 2, False)
        # Adam's bias correction counts applied steps only, so that the weights agree.
        assert all(map(torch.equal, _weights(first), _weights(second)))

    run_ranks(1, body, Plan.uniform(2, precision=FP16))


def test_the_scale_doubles_after_many_good_steps_and_has_a_floor() -> None:
    scale = LossScale(torch.device("cpu"))
    good, bad = torch.tensor(1.0), torch.tensor(float("inf"))
    start = float(scale.value)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(good)
    assert float(scale.value) == start
    assert read(scale.update(good)) == (2 * start, 0, False)
    told = [read(scale.update(bad)) for _ in range(20)]
    assert told[0] == (start, 1, True)
    assert told[-1] == (LEAST, 20, False)  # a smaller scale would not help: the run must stop
