"""User case PUB-028: more tensor ranks than KV heads, from training to generation."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from logits import logits
from safetensors import safe_open
from serve_samples import config_of, save_model
from tiny_runs import losses
from verbs import Ranks, job

from triptych.plan.plan import Plan, Precision

FP32 = Precision(parameter="fp32")
IDS = [7, 100, 23, 250]
LENGTH = (
    *("--set", "train.steps=6", "train.microbatch=8"),
    *("checkpoint.every=3", "train.check_replicas_every=3"),
)


def test_pub_028_eight_query_and_two_kv_heads_train_resume_export_and_answer_on_8_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Replicas of KV heads are compared by the run itself."""
    path = job(tmp_path)
    run = tmp_path / "run"
    ranks.done("train", path, "--plan", "dp=1", *LENGTH)
    whole = losses(path)
    shutil.rmtree(run)
    ended = ranks.done("train", path, "--plan", "tp=4", *LENGTH)
    assert ended.err.count("all replicas are bitwise equal") == 2
    assert losses(path) == pytest.approx(whole, abs=1e-5)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    ended = ranks.done("train", path, "--plan", "tp=8", *LENGTH)
    assert "after step 3" in ended.err and "step 6: all replicas are bitwise equal" in ended.err
    assert losses(path) == pytest.approx(whole, abs=1e-5)
    ranks.done("export", run, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for layer in range(4):
            for name in ("k_proj", "v_proj"):
                key = f"model.layers.{layer}.self_attn.{name}.weight"
                assert file.get_slice(key).get_shape() == [2 * 8, 64]
    generate = ["generate", tmp_path / "out", "--prompt", "alpha beta", "--max-new-tokens", "6"]
    assert ranks.done(*generate, "--plan", "tp=4").out == ranks.done(*generate).out
    require_same_logits(tmp_path / "out", 4, 8)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(12, 4, 3), (9, 3, 2)])
def test_pub_028_kv_heads_that_neither_divide_nor_repeat_evenly_are_shared_unevenly(
    ranks: Ranks, tmp_path: Path, heads: int, kv_heads: int, tp: int
) -> None:
    """The two cases that others refuse."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    save_model(tmp_path / "model", config_of(**shape, hidden_size=72))
    require_same_logits(tmp_path / "model", tp)


def require_same_logits(folder: Path, *degrees: int) -> None:
    expected = logits(folder, Plan.uniform(4, precision=FP32), IDS)
    for tp in degrees:
        found = logits(folder, Plan.uniform(4, tp=tp, precision=FP32), IDS)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
