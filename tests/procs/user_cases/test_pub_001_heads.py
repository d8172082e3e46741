"""User case PUB-001: heads that tensor parallelism cannot share are refused with what works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from logits import logits
from serve_samples import config_of, save_model
from tiny_runs import WITHOUT_TORCH, losses
from verbs import Ended, Ranks, job, process, tree

from triptych.plan.plan import Plan, Precision

SHAPES = [(14, 2), (6, 2)]
IDS = [5, 17, 3, 250, 9, 41]


def offered(text: str) -> list[int]:
    """The tensor degrees that a message offers."""
    found = re.search(r"tp in ([\d, ]+)", text)
    assert found, text
    return [int(word) for word in found.group(1).split(",")]


def shape(heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "hidden_size": 8 * heads,
    }


def require_refusal(ended: Ended, heads: int, kv_heads: int) -> None:
    assert ended.code == 2
    for words in ("tp=4 for", f"{heads} query heads", f"{kv_heads} KV heads"):
        assert words in ended.problems


def test_pub_001_plan_train_and_generate_refuse_before_torch_or_a_weight_is_read(
    tmp_path: Path,
) -> None:
    """The weights here are no weights, and nobody notices."""
    path = job(tmp_path, **shape(14, 2))
    model = tmp_path / "model"
    save_model(model, config_of(**shape(14, 2)))
    (model / "model.safetensors").write_bytes(b"read me and fail")
    plan = ["plan", model, "--cluster", "1x4xcpu", "--seq", "16", "--batch", "8", "--fix", "tp=4"]
    generate = ["generate", model, "--prompt", "alpha", "--plan", "tp=4"]
    before = tree(tmp_path)
    for args in (plan, ["train", path, "--plan", "tp=4"], generate):
        ended = process("-c", WITHOUT_TORCH, *args, folder=tmp_path)
        require_refusal(ended, 14, 2)
        assert offered(ended.problems)[:2] == [1, 2]
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_pub_001_train_refuses_and_every_degree_that_it_offers_trains_as_one_process(
    ranks: Ranks, tmp_path: Path, heads: int, kv_heads: int
) -> None:
    """Named plans and pinned searches alike."""
    path = job(tmp_path, **shape(heads, kv_heads))
    pinned = ["--set", "parallel.fix={tp = 4}", "parallel.ranks=4"]
    for asked in (["--plan", "tp=4"], pinned):
        ended = ranks("train", path, *asked)
        require_refusal(ended, heads, kv_heads)
    found = {}
    for tp in offered(ended.problems):
        folder = f"run.folder={tmp_path}/run"
        short = ("--set", "train.steps=3", "train.microbatch=8")
        ranks.done("train", path, "--plan", f"tp={tp}", *short, folder)
        found[tp] = losses(path)
        (tmp_path / "run").rename(tmp_path / f"run-{tp}")
    assert list(found) == [1, 2]
    assert found[2] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_pub_001_generate_refuses_and_every_degree_that_it_offers_has_the_logits_of_one_process(
    ranks: Ranks, tmp_path: Path, heads: int, kv_heads: int
) -> None:
    """Up to one query head a rank."""
    save_model(tmp_path, config_of(**shape(heads, kv_heads)))
    generate = ["generate", tmp_path, "--max-new-tokens", "4", "--prompt", "import os"]
    ended = ranks(*generate, "--plan", "tp=4")
    require_refusal(ended, heads, kv_heads)
    degrees = offered(ended.problems)
    assert degrees == ([1, 2, heads])
    fp32 = Precision(parameter="fp32")
    expected = logits(tmp_path, Plan.uniform(4, precision=fp32), IDS)
    for tp in degrees[1:]:
        found = logits(tmp_path, Plan.uniform(4, tp=tp, precision=fp32), IDS)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def test_pub_001_generate_starts_the_ranks_of_a_degree_that_was_offered(
    ranks: Ranks, tmp_path: Path
) -> None:
    save_model(tmp_path, config_of(**shape(14, 2)))
    generate = ["generate", tmp_path, "--max-new-tokens", "4", "--prompt", "import os"]
    assert ranks.done(*generate, "--plan", "tp=2").out == ranks.done(*generate).out != ""
