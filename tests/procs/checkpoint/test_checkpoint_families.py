"""Every family through the hub's format, our checkpoints and several plans, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_samples import UNEVEN, family_config
from hf_samples import stock_model
from layouts import make_engine
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from triptych.checkpoint.export import export
from triptych.checkpoint.hf import load_hf
from triptych.checkpoint.read import load
from triptych.checkpoint.write import save
from triptych.plan.plan import Plan

STAGES_OF_TWO = Plan.uniform(4, tp=2, pp=2)
SHARDED = Plan.uniform(4, dp=2, tp=2, zero=1, sequence_parallel=True)


def _from_hub(plan: Plan, config: dict[str, Any], source: Path, folder: Path) -> None:
    engine = make_engine(plan, config)
    load_hf(source, engine.shards())
    engine.after_load(0)
    save(folder, 1, engine.shards(), {}, files={"config.json": json.dumps(config).encode()})


def _onwards(plan: Plan, config: dict[str, Any], source: Path, folder: Path) -> None:
    engine = make_engine(plan, config)
    load(source, engine.shards())
    engine.after_load(1)
    save(folder, 2, engine.shards(), {}, files={"config.json": json.dumps(config).encode()})


def _reloaded(folder: Path) -> Any:
    """The stock library's model of an export; nothing missing, nothing too many."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", UNEVEN)
def test_a_hub_directory_goes_through_two_plans_and_comes_back_bit_by_bit(
    tmp_path: Path, family: str
) -> None:
    config = family_config(family, uneven=True)
    model = stock_model(config)
    model.save_pretrained(tmp_path / "source")
    run_ranks(4, _from_hub, STAGES_OF_TWO, config, tmp_path / "source", tmp_path / "first")
    first = tmp_path / "first" / "step-00000001"
    run_ranks(4, _onwards, SHARDED, config, first, tmp_path / "second")
    export(tmp_path / "second", tmp_path / "out")
    found = _reloaded(tmp_path / "out").state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_hub_directory_of_a_bare_trunk_with_stored_masks_is_read(tmp_path: Path) -> None:
    """As the first GPT-2 files are: no prefix, and the causal mask as a tensor."""
    config = family_config("gpt2")
    model = stock_model(config)
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    stored = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(stored, file, {"format": "pt"})
    plan = Plan.uniform(4)
    run_ranks(1, _from_hub, plan, config, tmp_path / "source", tmp_path / "first")
    export(tmp_path / "first", tmp_path / "out")
    found = dict(_reloaded(tmp_path / "out").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name
