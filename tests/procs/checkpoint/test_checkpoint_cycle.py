"""From a hub directory through a step of training under a plan back to a hub directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_samples import config_of, stock_model
from layouts import batch_of, make_engine, split
from ranks import run_ranks

from triptych.checkpoint.export import export
from triptych.checkpoint.hf import load_hf
from triptych.checkpoint.write import save
from triptych.plan.plan import Plan, Precision

SEQUENCES = 6
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp3": {"tp": 3},
    "dp3-zero": {"dp": 3, "zero": 1},
    "dp2-tp2-zero": {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True},
}


def one_step(name: str, source: Path, folder: Path, precision: Precision) -> None:
    """Loads a hub directory, trains one step and saves."""
    config = json.loads((source / "config.json").read_text())
    plan = Plan.uniform(2, precision=precision, **PLANS[name])
    engine = make_engine(plan, config, eps=1e-2)  # without it, noise in tiny gradients is magnified
    load_hf(source, engine.shards())
    engine.after_load(0)
    rows = batch_of(0, SEQUENCES, 12, config["vocab_size"])
    engine.step(split(rows, plan, engine.mesh.coordinates), 1e-2)
    files = {"config.json": json.dumps(config).encode()}
    save(folder, 1, engine.shards(), {}, files=files)


def exported(name: str, source: Path, root: Path, precision: Precision) -> Any:
    """The stock library's model of what a plan trained."""
    plan = Plan.uniform(2, **PLANS[name])
    run_ranks(plan.world_size, one_step, name, source, root / name, precision)
    export(root / name, root / f"{name}-out", max_shard_bytes=9000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        root / f"{name}-out", output_loading_info=True
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_step_under_any_plan_exports_the_weights_of_one_process(
    tmp_path: Path, family: str
) -> None:
    source = tmp_path / "source"
    model = stock_model(config_of(family))
    model.save_pretrained(source, max_shard_size="10KB")
    assert len(list(source.glob("*.safetensors"))) >= 3
    reference = exported("one", source, tmp_path, Precision())
    assert not torch.equal(reference.model.norm.weight, model.model.norm.weight)
    for name in PLANS:
        if name != "one":
            found = dict(exported(name, source, tmp_path, Precision()).named_parameters())
            for key, expected in reference.named_parameters():
                torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-5)


def test_a_mixed_precision_run_exports_bf16_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    stock_model(config_of("qwen3")).save_pretrained(source)
    model = exported("dp2-tp2-zero", source, tmp_path, Precision.mixed())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
