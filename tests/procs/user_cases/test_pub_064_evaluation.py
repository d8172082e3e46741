"""User case PUB-064: evaluation counts every sample once, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import metrics
from verbs import Ranks, job

LENGTHS = (3, 14, 9, 1, 6, 11, 2)


def evaluated(ranks: Ranks, folder: Path, lengths: list[int], plan: str) -> tuple[float, int]:
    """The loss and tokens of an evaluation set with documents of some lengths, before training."""
    folder.mkdir(parents=True)
    path = job(folder)
    rows = [{"text": chr(97 + i % 26) * length} for i, length in enumerate(lengths)]
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"data.eval={folder}/eval.jsonl", "data.pack=single", "train.steps=1"]
    ranks.done("train", path, "--plan", plan, "--set", *settings, "train.global_batch=4")
    line = next(line for line in metrics(path) if "eval_loss" in line)
    return line["eval_loss"], line["eval_tokens"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("count", "plans"), [(5, ["dp=4", "pp=2"]), (21, ["dp=2,zero=3"]), (2, ["dp=4"])]
)
def test_pub_064_the_loss_is_that_of_one_process_and_the_tokens_are_counted_once(
    ranks: Ranks, tmp_path: Path, count: int, plans: list[str]
) -> None:
    """Two samples are fewer than data ranks."""
    lengths = [LENGTHS[i % len(LENGTHS)] + i // len(LENGTHS) for i in range(count)]
    loss, tokens = evaluated(ranks, tmp_path / "one", lengths, "dp=1")
    for plan in plans:
        found = evaluated(ranks, tmp_path / plan, lengths, plan)
        assert found == (pytest.approx(loss, abs=1e-6), tokens)


def test_pub_064_the_loss_is_weighted_by_tokens(ranks: Ranks, tmp_path: Path) -> None:
    whole = evaluated(ranks, tmp_path / "whole", [3, 14], "dp=2")
    (first, few), (_, many) = (evaluated(ranks, tmp_path / str(n), [n], "dp=1") for n in (3, 14))
    assert whole[1] == few + many
    rest = (whole[0] * whole[1] - first * few) / many  # documents differ by letter
    assert min(first, rest) <= whole[0] <= max(first, rest)
