"""User case PUB-056: a start with weights alone reads nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import step_folder, whole_tensors
from tiny_runs import losses
from verbs import Ranks, job

FAMILIES = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pub_056_optimizer_files_may_be_gone_unless_they_are_asked_for(
    ranks: Ranks, tmp_path: Path, family: str
) -> None:
    path, run = job(tmp_path / "old", **FAMILIES[family]), tmp_path / "old" / "run"
    path.write_text(path.read_text().replace('"llama"', f'"{family}"'))
    ranks.done("train", path, "--plan", "dp=2,zero=1", "--set", "train.steps=3")
    checkpoint = step_folder(run, 3)
    weights = {key: t for key, t in whole_tensors(checkpoint).items() if key[0] == "weight"}
    gone = sorted(file.name for file in checkpoint.glob("*.optimizer.safetensors"))
    for name in gone:
        (checkpoint / name).unlink()

    more = ("--plan", "tp=2", "--set", "train.steps=4")
    ended = ranks("train", path, *more)
    assert ended.code == 2 and gone[0] in ended.problems and "missing" in ended.problems
    assert list(losses(path)) == [1, 2, 3]  # before training

    new = job(tmp_path / "new", **FAMILIES[family])
    config = f'[model]\npath = "{checkpoint}"\ninit = "weights"\n\n[tokenizer]'
    text = new.read_text()
    new.write_text(
        text.replace(text[text.index("[model.config]") : text.index("[tokenizer]") + 11], config)
    )
    ranks.done("train", new, *more, "train.steps=1", "optimizer.learning_rate=1e-30")
    found = whole_tensors(step_folder(tmp_path / "new" / "run", 1))
    assert all(found[key].equal(tensor) for key, tensor in weights.items())

    ended = ranks.done("train", path, *more, "checkpoint.resume=weights")
    assert "the optimizer starts anew" in ended.err and list(losses(path)) == [1, 2, 3, 4]
