"""A mixture of experts from the first step to its Hugging Face directory, in groups that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expert_samples import mixture
from tiny_runs import losses, metrics
from verbs import Ranks, job

EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **EXPERTS},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "decoder_sparse_step": 2,
    },
    "gpt_oss": {"model_type": "gpt_oss", **EXPERTS, "head_dim": 16, "sliding_window": 8},
    "llama4_text": {
        "model_type": "llama4_text",
        **EXPERTS,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
    },
}
SETTINGS = ("--set", "train.steps=4", "checkpoint.every=2", "moe.aux_loss=0.01", "moe.z_loss=0.001")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_train_resume_export_and_generate(ranks: Ranks, tmp_path: Path, family: str) -> None:
    path = job(tmp_path, **FAMILIES[family])
    run = tmp_path / "run"
    ranks.done("train", path, "--plan", "dp=4,ep=2,zero=1", *SETTINGS)
    whole = losses(path)
    lines = [line for line in metrics(path) if "loss" in line]
    assert all(line["aux_loss"] > 0 and line["z_loss"] > 0 for line in lines)
    assert all(line["dropped_tokens"] == 0 for line in lines)
    (run / "checkpoints" / "step-00000004").rename(tmp_path / "kept")
    ended = ranks.done("train", path, "--plan", "dp=2,ep=2,tp=2,sp=1", *SETTINGS)
    assert "after step 2" in ended.err
    assert losses(path) == pytest.approx(whole, abs=1e-5)
    ranks.done("export", run, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()) and isinstance(model, torch.nn.Module)
    generate = ["generate", tmp_path / "out", "--prompt", "alpha beta", "--max-new-tokens", "4"]
    assert ranks.done(*generate, "--plan", "tp=2").out == ranks.done(*generate).out


def test_verify_compares_a_layout_of_experts_with_one_process(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(mixture()))
    asked = ["--seq", "16", "--batch", "4", "--steps", "1"]
    ended = ranks.done("verify", tmp_path / "config.json", "--plan", "dp=2,ep=2", *asked)
    assert "the same as one process" in ended.out, ended


def test_a_capacity_is_counted_in_the_metrics(ranks: Ranks, tmp_path: Path) -> None:
    path = job(tmp_path, **FAMILIES["mixtral"])
    ranks.done("train", path, "--plan", "dp=2,ep=2", "--set", "moe.capacity_factor=0.5")
    assert all(line["dropped_tokens"] > 0 for line in metrics(path) if "loss" in line)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("moe.capacity_factor=1.0", "--plan", "cp=2"), "capacity_factor = 1.0 with cp=2"),
        (("moe.aux_loss=-1.0",), "aux_loss"),
    ],
)
def test_settings_of_routers_that_cannot_be_are_refused(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...], text: str
) -> None:
    path = job(tmp_path, **FAMILIES["mixtral"])
    ended = ranks("train", path, "--set", *settings)
    assert ended.code == 2 and text in ended.problems


def test_settings_of_routers_need_experts(ranks: Ranks, tmp_path: Path) -> None:
    ended = ranks("train", job(tmp_path), "--plan", "dp=1", "--set", "moe.z_loss=0.1")
    assert ended.code == 2 and "has no experts" in ended.problems
