"""User case PUB-047: one naming for all layouts; a stored tensor that is unmatched is an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import Tensors, keep_only, rewrite, step_folder, whole_tensors
from tiny_runs import losses
from verbs import Ranks, job

UP = "model.layers.1.mlp.up_proj.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"
RENAMED = "model.layers.2.self_attn.query_proj.weight"
EXTRA = "model.layers.9.mlp.up_proj.weight"


def test_pub_047_a_pipelined_run_goes_on_without_a_pipeline_and_back(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Three uneven stages, one process, two stages."""
    path = job(tmp_path)
    settings = (
        *("--set", "train.steps=6", "train.microbatch=2"),
        *("checkpoint.every=2", "checkpoint.keep_last=3"),
    )
    ranks.done("train", path, "--plan", "pp=3", *settings)
    whole = losses(path)
    for plan, step in (("dp=1", 2), ("pp=2", 4)):
        keep_only(tmp_path / "run", step)
        ended = ranks.done("train", path, "--plan", plan, *settings)
        assert f"after step {step}" in ended.err
        assert losses(path)[step + 1] == pytest.approx(whole[step + 1], abs=1e-6)
        assert losses(path) == pytest.approx(whole, abs=1e-5)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one step on two stages."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.done("train", job(folder), "--plan", "pp=2", "--set", "train.steps=1")
    return folder / "run"


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != ("weight", name)}


def damaged(tensors: Tensors, case: str) -> Tensors:
    if case == "deleted":
        return without(tensors, UP)
    if case == "renamed":
        return {**without(tensors, QUERY), ("weight", RENAMED): tensors["weight", QUERY]}
    return {**tensors, ("weight", EXTRA): tensors["weight", UP]}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("deleted", [f"lacks 1 tensor: weight/{UP}"]),
        (
            "renamed",
            [
                f"lacks 1 tensor: weight/{QUERY}",
                f"has 1 tensor too many: weight/{RENAMED}",
                f"is '{RENAMED}' meant",
            ],
        ),
        ("added", [f"has 1 tensor too many: weight/{EXTRA}"]),
    ],
)
def test_pub_047_a_deleted_a_renamed_and_an_added_tensor_are_refused_by_name(
    ranks: Ranks, tmp_path: Path, saved: Path, case: str, words: list[str]
) -> None:
    """By training and by generation; the checkpoint stays as it is."""
    path = job(tmp_path)
    shutil.copytree(saved, tmp_path / "run")
    checkpoint = step_folder(tmp_path / "run", 1)
    rewrite(checkpoint, damaged(whole_tensors(checkpoint), case))
    before = {file: file.read_bytes() for file in checkpoint.iterdir()}
    run_files = {file: file.read_bytes() for file in (tmp_path / "run").glob("*.*")}
    assert tmp_path / "run" / "plan.toml" in run_files
    resume = ("train", path, "--plan", "dp=2", "--set", "train.steps=2")
    for command in (resume, ("generate", tmp_path / "run", "--prompt", "alpha")):
        ended = ranks(*command)
        assert ended.code == 2
        assert all(word in ended.problems for word in words), ended.problems
    assert {file: file.read_bytes() for file in checkpoint.iterdir()} == before
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("*.*")} == run_files
    assert list(losses(path)) == [1]
