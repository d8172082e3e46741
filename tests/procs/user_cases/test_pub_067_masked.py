"""User case PUB-067: answers that the length limit cuts off are counted, and refused if all are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from chat_samples import dialogue, write_chat_tokenizer, write_dialogues
from tiny_runs import losses, metrics
from verbs import Ended, Ranks, job, tree

LONG, SHORT = "x" * 40, "hi"


def train(ranks: Ranks, folder: Path, prompts: list[str], plan: str, batch: int = 2) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    path = job(folder)
    write_chat_tokenizer(folder / "tokenizer")
    write_dialogues(folder / "talk.jsonl", *(dialogue(text, "yes sir") for text in prompts))
    settings = [f"data.train={folder}/talk.jsonl", "data.format=chat", "data.pack=single"]
    more = ["data.sequence_length=32", "train.steps=2", f"train.global_batch={batch}"]
    before = tree(folder)
    ended = ranks("train", path, "--plan", plan, "--set", *settings, *more)
    assert ended.code == 0 or tree(folder) == before
    return ended


def test_pub_067_no_answer_in_reach_is_refused_with_the_length_that_has_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    ended = train(ranks, tmp_path, [LONG] * 4, "dp=2")
    assert ended.code == 2
    assert "4 dialogues have no answer within 32 tokens" in ended.problems
    assert "sequence_length = 45 or more" in ended.problems


@pytest.mark.parametrize("lost", [2, 1])
def test_pub_067_lost_answers_are_told_and_the_loss_is_that_of_the_rest(
    ranks: Ranks, tmp_path: Path, lost: int
) -> None:
    kept = [SHORT + "abc"[i] for i in range(4 - lost)]
    batch = 2 if lost == 2 else 3
    plan = "dp=2" if batch == 2 else "dp=3"
    ended = train(ranks, tmp_path / "some", [*kept, *([LONG] * lost)], plan, batch)
    assert ended.code == 0
    assert f"of 4 documents {lost} have nothing to train and are left out" in ended.err
    assert train(ranks, tmp_path / "rest", kept, "dp=1", batch).code == 0
    path, rest = (tmp_path / name / "job.toml" for name in ("some", "rest"))
    assert losses(path) == pytest.approx(losses(rest), abs=1e-5)
    assert all(math.isfinite(loss) for loss in losses(path).values())
    tokens = [line["tokens"] for line in metrics(path) if "loss" in line]
    assert tokens == [8 * batch] * 2, "seven letters and the end of each answer"
