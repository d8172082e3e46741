"""Faults of today's tools, by their number in the collection of user cases: sharded state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layouts import Run, batch_of, make_engine, merge, split, tiny_config
from ranks import run_ranks

from triptych.checkpoint.export import export
from triptych.checkpoint.read import load, state
from triptych.checkpoint.write import save
from triptych.model.count import parameters
from triptych.model.hf import from_config
from triptych.plan.plan import Plan, Precision
from triptych.runtime.engine import Engine

# Odd sizes, so that padding differs from one number of ranks to another.
ODD = tiny_config(hidden_size=56, intermediate_size=150, vocab_size=503, num_attention_heads=4)
SAVED, LAST, BATCH = 10, 20, 12


def _train(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        rows = batch_of(step, BATCH, 16, ODD["vocab_size"])
        share = split(rows, engine.plan, engine.mesh.coordinates)
        losses.append(engine.step(share, 1e-3).loss)
    return losses


def _pieces(engine: Engine) -> list[Any]:
    return [
        (s.kind, s.name, s.shape, s.box, s.tensor.detach().numpy().copy()) for s in engine.shards()
    ]


def _plan(dp: int, zero: int) -> Plan:
    """Several micro-batches a step, and no more than that takes."""
    return Plan.uniform(4, dp=dp, zero=zero, microbatch=1 if dp == 4 else BATCH // dp // 2)


def _unbroken(plan: Plan, folder: Path) -> Run:
    engine = make_engine(plan, ODD)
    _train(engine, 0, SAVED)
    save(folder, SAVED, engine.shards(), {})
    run = Run()
    run.tensors["pieces", ""] = _pieces(engine)  # type: ignore[assignment]
    run.losses.extend(_train(engine, SAVED, LAST))
    return run


def _resumed(plan: Plan, checkpoint: Path) -> Run:
    engine = make_engine(plan, ODD)
    load(checkpoint, engine.shards())
    engine.after_load(state(checkpoint)["step"])
    run = Run()
    run.tensors["pieces", ""] = _pieces(engine)  # type: ignore[assignment]
    run.losses.extend(_train(engine, SAVED, LAST))
    return run


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_pub_040_a_run_goes_on_with_any_number_of_ranks_and_stage(
    tmp_path: Path, zero: int
) -> None:
    before = merge(run_ranks(4, _unbroken, _plan(4, zero), tmp_path))
    checkpoint = tmp_path / f"step-{SAVED:08d}"
    others = [(1, zero), (2, zero if zero > 1 else 0), (3, zero % 3 + 1)]
    for dp, stage in others:
        after = merge(run_ranks(dp, _resumed, _plan(dp, stage), checkpoint))
        assert after.tensors.keys() == before.tensors.keys()
        for key, expected in before.tensors.items():
            assert torch.equal(after.tensors[key], expected), (dp, stage, key)
        assert after.losses == pytest.approx(before.losses, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dp", [2, 4])
def test_pub_042_an_export_under_zero_3_has_every_weight(
    tmp_path: Path, dp: int, precision: str
) -> None:
    config = tiny_config()
    dtypes = {"fp32": Precision(), "bf16": Precision.mixed()}[precision]
    ids = torch.arange(20)[None]

    def body() -> torch.Tensor:
        engine = make_engine(Plan.uniform(4, dp=dp, zero=3, precision=dtypes), config)
        rows = split(batch_of(0, 4, 24, 512), engine.plan, engine.mesh.coordinates)
        engine.step(rows, 1e-3)
        files = {"config.json": json.dumps(config).encode()}
        save(tmp_path, 1, engine.shards(), {}, files=files)
        stage = engine.stages[0].eval()
        with torch.no_grad():
            return stage.local_logits(stage(ids)).float().numpy()

    trained = torch.from_numpy(run_ranks(dp, body)[0])
    export(tmp_path / "step-00000001", tmp_path / "out")
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    width = {"fp32": 4, "bf16": 2}[precision]
    assert written == pytest.approx(parameters(from_config(config, "tiny")) * width, rel=0.01)
    reloaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(info.values())
    with torch.no_grad():
        logits = reloaded.eval()(input_ids=ids).logits.float()
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(trained, logits, rtol=tolerance, atol=tolerance)
