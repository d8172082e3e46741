"""A Hugging Face directory fills any layout; what cannot be read is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import assert_same_bytes, emptied, layout, wanted
from hf_samples import CONFIGS, config_of, stock_model, weights_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from triptych.checkpoint.hf import hf_parts, load_hf
from triptych.errors import CheckpointError


def saved_model(folder: Path, config: dict[str, Any], max_shard_size: str = "5GB") -> Any:
    model = stock_model(config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def _load_share(folder: Path, tensors: Any, seed: int, ranks: int) -> None:
    rank = dist.get_rank() if ranks > 1 else 0
    ours = emptied(layout(tensors, seed, ranks)[rank])
    load_hf(folder, ours)
    assert_same_bytes(ours, tensors)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "6KB"])
def test_every_layout_is_filled_from_one_file_or_many(
    tmp_path: Path, family: str, max_shard_size: str
) -> None:
    model = saved_model(tmp_path, config_of(family), max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "6KB")
    tensors = weights_of(model)
    for seed in range(3):
        for held in layout(tensors, seed, 3):
            ours = emptied(held) + wanted(tensors)
            load_hf(tmp_path, ours)
            assert_same_bytes(ours, tensors)


def test_ranks_read_their_slices_together(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of(), "6KB"))
    run_ranks(3, _load_share, tmp_path, tensors, 4, 3)


def test_masters_are_filled_and_moments_left_alone(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of()))
    masters = {("master", name): value for (_, name), value in tensors.items()}
    moments = {("exp_avg", name): torch.zeros_like(v) for (_, name), v in tensors.items()}
    ours = [*wanted(masters), *wanted(tensors, torch.bfloat16)]
    untouched = wanted(moments)
    load_hf(tmp_path, [*ours, *untouched])
    for shard in ours:
        assert torch.equal(shard.tensor, tensors["weight", shard.name].to(shard.tensor.dtype))
    assert all(shard.tensor.isnan().all() for shard in untouched)


def test_a_head_stored_in_a_tied_model_is_ignored(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of("qwen3")))
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = torch.zeros(61, 24)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = wanted(tensors)
    load_hf(tmp_path, ours)
    assert_same_bytes(ours, tensors)


def test_the_head_of_an_untied_model_is_not_dropped_in_silence(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of("llama")))
    del tensors["weight", "lm_head.weight"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"too many: weight/lm_head.weight"):
        load_hf(tmp_path, wanted(tensors))


def test_a_head_that_an_untied_model_lacks_is_named(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of("qwen3")))
    tensors["weight", "lm_head.weight"] = torch.zeros(61, 24)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: weight/lm_head.weight"):
        load_hf(tmp_path, wanted(tensors))


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin[\s\S]*runs code"):
        load_hf(tmp_path, [])


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    saved_model(tmp_path, config_of("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantised \(mxfp4\)"):
        load_hf(tmp_path, [])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights"):
        load_hf(tmp_path, [])


def test_a_weight_file_that_the_index_names_but_is_absent_is_named(tmp_path: Path) -> None:
    saved_model(tmp_path, config_of(), "6KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        hf_parts(tmp_path)


def test_a_tensor_that_the_index_promises_but_no_file_holds_is_named(tmp_path: Path) -> None:
    saved_model(tmp_path, config_of(), "6KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.bias"] = index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks lm_head.bias"):
        hf_parts(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_damaged_index_of_weights_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        hf_parts(tmp_path)


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        hf_parts(tmp_path)


def test_quantised_weights_are_refused_with_their_type(tmp_path: Path) -> None:
    tensors = weights_of(saved_model(tmp_path, config_of()))
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = stored[name].to(torch.int8)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is stored as I8"):
        load_hf(tmp_path, wanted(tensors))
