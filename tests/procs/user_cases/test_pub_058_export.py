"""User cases PUB-058, 060 and 062: what is exported is whole, is the model, and loads in stock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import step_folder, whole_tensors
from job_samples import write_text
from logits import logits
from safetensors import safe_open
from serve_samples import END, byte_tokenizer, config_of, stock_model
from verbs import Ranks

from triptych.plan.plan import Plan

JOB = """\
[run]
folder = "{folder}/run"

[model]
path = "{folder}/source"
init = "weights"

[data]
train = ["{folder}/text"]
sequence_length = 16

[train]
steps = 2
global_batch = 6
"""
UNMOVED = "optimizer.learning_rate=1e-30"


def source_of(folder: Path, config: dict[str, Any], shard_kib: int = 100) -> Any:
    """A model directory from the hub, in several files, and a job that trains it."""
    model = stock_model(config)
    model.save_pretrained(folder / "source", max_shard_size=f"{shard_kib}KB")
    byte_tokenizer().save(str(folder / "source" / "tokenizer.json"))
    names = {"eos_token": END}
    (folder / "source" / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "source" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    write_text(folder / "text")
    (folder / "job.toml").write_text(JOB.format(folder=folder))
    return model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by name; each is in one file."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            names = set(handle.keys())
            assert not names & set(found)
            found |= {name: handle.get_tensor(name) for name in names}
    return found


def loaded(folder: Path) -> Any:
    """The stock library's model; nothing is missing, unexpected or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", ["tp=3,pp=2", "dp=2,zero=3", "dp=3,zero=3,microbatch=1"])
def test_pub_058_a_tied_model_from_several_files_is_exported_whole(
    ranks: Ranks, tmp_path: Path, plan: str
) -> None:
    """User case PUB-060 too: sizes that no number of ranks divides, and every shape is checked."""
    config = config_of("qwen2", intermediate_size=66, vocab_size=307)
    source_of(tmp_path, config)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) >= 3
    ranks.done("train", tmp_path / "job.toml", "--plan", plan)
    out = tmp_path / "out"
    ranks.done("export", tmp_path / "run", out, "--max-shard-mib", "0.05")
    found, index = tensors_in(out), json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found) and "lm_head.weight" not in found
    assert {path.name for path in out.glob("*.safetensors")} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "source" / name).read_bytes()

    model, trained = loaded(out), whole_tensors(step_folder(tmp_path / "run", 2))
    assert found.keys() == {name for kind, name in trained if kind == "weight"}
    for name, parameter in model.named_parameters():
        assert parameter.shape == found[name].shape
        assert torch.equal(parameter, trained["weight", name])
    assert not torch.equal(
        found["model.norm.weight"], tensors_in(tmp_path / "source")["model.norm.weight"]
    )


CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 6, "tie_word_embeddings": True},  # heads of their own
    "mistral": {"head_dim": 4, "rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": False},  # biases of queries, keys and values
    "qwen3": {"rms_norm_eps": 1e-6},  # norms of queries and keys
}
IDS = [(7 * i * i + 3) % 300 for i in range(81)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", CASES)
def test_pub_062_an_imported_model_has_the_logits_of_stock_and_its_export_the_same_bits(
    ranks: Ranks, tmp_path: Path, family: str
) -> None:
    model = source_of(tmp_path, config_of(family, **CASES[family]))
    with torch.no_grad():
        stock = model(input_ids=torch.tensor([IDS])).logits[0]
        padded = model(
            input_ids=torch.tensor([[0] * 5 + IDS[:9]]),
            attention_mask=torch.tensor([[0] * 5 + [1] * 9]),
            position_ids=torch.tensor([[0] * 5 + [*range(9)]]),
        ).logits[0, -1]
    for plan in (Plan.uniform(4), Plan.uniform(4, tp=3), Plan.uniform(4, pp=2)):
        for count in (1, 2, 9, 81):
            ours = torch.from_numpy(logits(tmp_path / "source", plan, IDS[:count]))
            torch.testing.assert_close(ours, stock[count - 1], atol=1e-4, rtol=1e-4)
            if count == 9:
                torch.testing.assert_close(ours, padded, atol=1e-4, rtol=1e-4)
    ranks.done("train", tmp_path / "job.toml", "--plan", "tp=3,pp=2", "--set", UNMOVED)
    ranks.done("export", tmp_path / "run", tmp_path / "out")
    before, after = tensors_in(tmp_path / "source"), tensors_in(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
