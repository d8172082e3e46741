"""PUB-073: every limit that experts and heads break, in one message, with pairs that start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from layouts import batch_of, make_engine, split
from ranks import run_ranks
from serve_samples import config_of, save_model
from verbs import Ranks, job, tree

from triptych.cluster.text import parse_cluster
from triptych.model.hf import from_config
from triptych.plan.short import parse_plan

SIZES: dict[str, Any] = {
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
CONFIG = config_of(**SIZES)
REMEDY = re.compile(r"(?:\w+=\d+,?)+")


def offered(text: str) -> list[str]:
    """The settings that a message says would work, where they name an expert degree."""
    lines = [line for line in text.splitlines() if line.strip().startswith("works:")]
    return [setting for line in lines for setting in REMEDY.findall(line) if "ep=" in setting]


def start(text: str, devices: int) -> None:
    """A step under a plan."""
    cluster = parse_cluster(f"1x{devices}xcpu")
    plan = parse_plan(text, from_config(CONFIG, "six experts"), cluster)

    def body() -> float:
        engine = make_engine(plan, CONFIG)
        rows = batch_of(0, 8, 16, CONFIG["vocab_size"])
        return engine.step(split(rows, plan, engine.mesh.coordinates), 1e-3).loss

    assert run_ranks(plan.world_size, body)[0] > 0


def test_pub_073_a_search_lists_every_limit_and_pairs_that_start(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = ["--cluster", "1x4xcpu", "--seq", "16", "--batch", "8"]
    both = ranks("plan", tmp_path / "config.json", *asked, "--fix", "ep=4,tp=3")
    assert both.code == 2
    assert "ep=4 for 6 experts" in both.problems and "4 devices" in both.problems
    settings = set(offered(both.problems))
    assert {"ep=2,tp=2,dp=2", "ep=2,tp=1,dp=4"} <= settings
    for setting in sorted(settings):
        start(f"{setting},microbatch=1", 4)


@pytest.mark.parametrize(
    ("plan", "devices"), [("ep=4,dp=4", 4), ("ep=4,tp=3,dp=2", 6), ("ep=6,dp=4", 4)]
)
def test_pub_073_training_refuses_all_at_once_and_writes_nothing(
    ranks: Ranks, tmp_path: Path, plan: str, devices: int
) -> None:
    path = job(tmp_path, **SIZES)
    before = tree(tmp_path)
    ended = ranks("train", path, "--plan", plan)
    assert ended.code == 2 and tree(tmp_path) == before
    limits = {
        "ep=4,dp=4": ["ep=4 for 6 experts"],
        "ep=4,tp=3,dp=2": ["ep=4 for 6 experts", "ep=4 with dp=2 x cp=1"],
        "ep=6,dp=4": ["ep=6 with dp=4 x cp=1"],
    }
    assert all(limit in ended.problems for limit in limits[plan])
    settings = set(offered(ended.problems))
    assert settings
    for setting in sorted(settings):
        whole = setting if "dp=" in setting else plan.replace(plan.split(",")[0], setting)
        start(whole, devices)


def test_pub_073_generation_lists_every_limit(ranks: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIG)
    generate = ["generate", tmp_path, "--prompt", "alpha", "--max-new-tokens", "2"]
    ended = ranks(*generate, "--plan", "ep=4,tp=16")
    assert ended.code == 2 and "ep=4 for 6 experts" in ended.problems
    assert "tp=16" in ended.problems and "works: ep=1" in ended.problems
    assert ranks.done(*generate, "--plan", "tp=3").out == ranks.done(*generate).out
