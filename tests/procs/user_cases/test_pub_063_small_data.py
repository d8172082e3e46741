"""User case PUB-063: a data set smaller than a batch is refused with what works, which does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_runs import losses
from verbs import Ended, Ranks, job, tree

LENGTH = 16


def write_tokens(folder: Path, *documents: int) -> int:
    """Documents of so many tokens each, in a file of their own; the tokens with all their ends."""
    lines = [json.dumps({"text": "~" * count}) for count in documents]
    (folder / "few.jsonl").write_text("\n".join(lines))
    return sum(documents) + len(documents)


def train(ranks: Ranks, path: Path, plan: str, *more: str) -> Ended:
    text = f"data.train={path.parent}/few.jsonl"
    return ranks("train", path, "--plan", plan, "--set", text, "train.steps=2", *more)


@pytest.mark.parametrize(
    ("samples", "plan", "batch", "more", "largest"),
    [
        (3, "dp=2", 8, ["train.accumulation=2"], None),  # DP x accumulation = 4 > 3 samples
        (3, "dp=2", 8, [], 2),
        (1, "dp=1", 8, [], 1),
        (3, "dp=4", 4, [], None),  # fewer sequences than data ranks
        (7, "dp=2,microbatch=2", 12, [], 4),
    ],
)
def test_pub_063_too_few_samples_are_refused_with_the_largest_batch_that_works(
    ranks: Ranks,
    tmp_path: Path,
    samples: int,
    plan: str,
    batch: int,
    more: list[str],
    largest: int | None,
) -> None:
    """And the batch that is offered trains."""
    path = job(tmp_path)
    tokens = write_tokens(tmp_path, samples * LENGTH + 4)
    before = tree(tmp_path)
    ended = train(ranks, path, plan, f"train.global_batch={batch}", *more)
    assert ended.code == 2 and tree(tmp_path) == before
    counts = f"{samples} samples of 16 tokens, but the global batch is {batch}"
    assert f"{tokens} tokens: {counts}" in ended.problems
    offered = re.search(r"global_batch = (\d+)(?: or less)? \|", ended.problems)
    if largest is None:
        assert offered is None
        assert f"global_batch = {samples} under a plan and a job that divide it" in ended.problems
        plan, more, largest = "dp=1", [], samples
    else:
        assert offered is not None and int(offered.group(1)) == largest
    ended = train(ranks, path, plan, f"train.global_batch={largest}", *more)
    assert ended.code == 0 and list(losses(path)) == [1, 2]


@pytest.mark.parametrize("documents", [(), (1,), (15,), (2, 2, 2, 2, 2)], ids=str)
def test_pub_063_no_whole_sample_is_refused_and_never_trains_zero_steps(
    ranks: Ranks, tmp_path: Path, documents: tuple[int, ...]
) -> None:
    """No text at all, and only text that is shorter than one sample."""
    path = job(tmp_path)
    tokens = write_tokens(tmp_path, *documents)
    before = tree(tmp_path)
    ended = train(ranks, path, "dp=2")
    assert ended.code == 2 and tree(tmp_path) == before
    counts = f"{len(documents)} documents with {tokens} tokens: 0 samples of 16 tokens"
    assert counts in ended.problems and "more text" in ended.problems
