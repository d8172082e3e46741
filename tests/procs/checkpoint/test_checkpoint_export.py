"""An export is a directory that the stock library loads without missing or unexpected keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_samples import layout, write_as_ranks
from hf_samples import (
    CONFIGS,
    GENERATION,
    TOKENIZER,
    checkpoint_of,
    config_of,
    logits,
    stock_model,
    weights_of,
)
from safetensors import safe_open

from triptych.checkpoint.export import export
from triptych.errors import CheckpointError


def loaded(folder: Path) -> Any:
    """The stock library's model of a directory; nothing may be missing, unexpected or misfit."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_stock_library_loads_an_export_with_equal_logits(
    tmp_path: Path, family: str, seed: int
) -> None:
    config = config_of(family)
    model = stock_model(config, seed)
    checkpoint = checkpoint_of(tmp_path / "run", model, config, seed=seed, ranks=seed + 1)
    export(checkpoint, tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    assert torch.equal(logits(theirs), logits(model))
    assert theirs.dtype == torch.float32


def test_small_files_have_an_index_of_what_is_written_and_nothing_else(tmp_path: Path) -> None:
    """A tied model: the index must not name a head that no file holds."""
    config = config_of("qwen2")
    model = stock_model(config)
    export(checkpoint_of(tmp_path / "run", model, config), tmp_path / "out", max_shard_bytes=5000)
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    assert set(index["weight_map"]) == set(shapes)
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as handle:
            assert handle.get_slice(name).get_shape() == shapes[name]
    size = sum(p.numel() * 4 for p in model.parameters())
    assert index["metadata"]["total_size"] == size
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert {path.name for path in out.iterdir()} == files | {
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert torch.equal(logits(loaded(out)), logits(model))


def test_tokenizer_and_generation_config_travel_along(tmp_path: Path) -> None:
    config = config_of()
    export(checkpoint_of(tmp_path / "run", stock_model(config), config), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == TOKENIZER
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == GENERATION
    assert not (tmp_path / "out" / "state.json").exists()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)],
)
def test_the_dtype_is_that_of_the_weights_or_as_asked_and_the_config_says_so(
    tmp_path: Path, dtype: str | None, expected: torch.dtype
) -> None:
    config = config_of(torch_dtype="float64")
    model = stock_model(config)
    checkpoint = checkpoint_of(tmp_path / "run", model, config, master=True)
    export(checkpoint, tmp_path / "out", dtype=dtype)
    theirs = loaded(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == str(expected).removeprefix("torch.")
    assert "torch_dtype" not in written
    assert written["architectures"] == [type(theirs).__name__]
    for name, parameter in theirs.named_parameters():
        assert parameter.dtype == expected
        assert torch.equal(parameter, model.get_parameter(name).to(expected))


def test_an_unknown_dtype_is_refused_with_close_ones(tmp_path: Path) -> None:
    config = config_of()
    checkpoint = checkpoint_of(tmp_path / "run", stock_model(config), config)
    with pytest.raises(CheckpointError, match=r"'bf61'[\s\S]*bf16"):
        export(checkpoint, tmp_path / "out", dtype="bf61")
    assert not (tmp_path / "out").exists()


def test_a_run_folder_means_its_newest_checkpoint_and_that_is_said(tmp_path: Path) -> None:
    config = config_of()
    checkpoint_of(tmp_path / "run" / "checkpoints", stock_model(config), config)
    notes = export(tmp_path / "run", tmp_path / "out")
    assert any("step-00000010" in note for note in notes)
    loaded(tmp_path / "out")


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    config = config_of()
    model = stock_model(config, seed=2)
    first = checkpoint_of(tmp_path / "first", stock_model(config), config)
    export(first, tmp_path / "out", max_shard_bytes=5000)
    export(checkpoint_of(tmp_path / "second", model, config), tmp_path / "out")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    config = config_of()
    (tmp_path / "out").mkdir()
    export(checkpoint_of(tmp_path / "run", stock_model(config), config), tmp_path / "out")
    loaded(tmp_path / "out")


def test_folders_with_other_content_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    config = config_of()
    checkpoint = checkpoint_of(tmp_path / "run", stock_model(config), config)
    stock_model(config).save_pretrained(tmp_path / "theirs")
    export(checkpoint, tmp_path / "ours")
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, words in (
        (tmp_path / "theirs", "holds something else"),
        (tmp_path / "ours", "notes.txt"),
        (tmp_path / "file", "holds something else"),
        (checkpoint, "holds something else"),
    ):
        before = sorted(out.iterdir()) if out.is_dir() else out.read_text()
        with pytest.raises(CheckpointError, match=words):
            export(checkpoint, out)
        assert before == (sorted(out.iterdir()) if out.is_dir() else out.read_text())


def test_a_model_that_is_not_that_of_its_config_is_refused_with_the_names(tmp_path: Path) -> None:
    tensors = weights_of(stock_model(config_of()))
    tensors["weight", "model.extra.weight"] = torch.zeros(3)
    tensors["weight", "model.norm.weight"] = torch.zeros(12)
    del tensors["weight", "lm_head.weight"]
    files = {"config.json": json.dumps(config_of()).encode()}
    checkpoint = write_as_ranks(tmp_path / "run", 10, layout(tensors, 0, 2), files)
    with pytest.raises(CheckpointError) as caught:
        export(checkpoint, tmp_path / "out")
    text = str(caught.value)
    assert "lacks lm_head.weight" in text
    assert "model.extra.weight" in text
    assert "model.norm.weight" in text and "[12]" in text and "[24]" in text
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    config = config_of()
    checkpoint = checkpoint_of(tmp_path / "run", stock_model(config), config)
    path = checkpoint / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged"):
        export(checkpoint, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
