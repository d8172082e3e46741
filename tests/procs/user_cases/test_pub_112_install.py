"""User case PUB-112: nothing that must be compiled is needed, and its absence is told."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from verbs import Ranks, job, process, tree

COMPILED = {"flash-attn", "flash_attn", "xformers", "transformer-engine", "deepspeed", "apex"}
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_pub_112_no_package_that_compiles_kernels_is_required() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert not {word for word in wanted if word.split(">")[0].split("[")[0] in COMPILED}


def test_pub_112_help_and_plan_need_no_compiler_and_no_device(tmp_path: Path) -> None:
    nothing = {"PATH": "", "CC": "/bin/false", "CXX": "/bin/false", "CUDA_HOME": "/nowhere"}
    plan = ("plan", "llama-3.1-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "8")
    for args in (("--help",), plan):
        ended = process("-m", "triptych", *args, folder=tmp_path, **nothing)
        assert ended.code == 0, ended.err


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_pub_112_training_says_which_kernels_are_absent_and_what_runs(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    ended = ranks.done("train", job(tmp_path), "--plan", "dp=2", "--set", "train.steps=3")
    assert "attention sdpa of torch" in ended.err and "flash-attn is absent" in ended.err


def test_pub_112_a_kernel_for_gpus_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    path = job(tmp_path)
    before = tree(tmp_path)
    ended = ranks("train", path, "--plan", "dp=2,attention=flash")
    assert ended.code == 2 and tree(tmp_path) == before
    assert "attention=flash" in ended.problems and "ImportError" not in ended.err
