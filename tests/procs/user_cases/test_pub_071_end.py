"""User case PUB-071: pad is the end token, and the model learns to stop all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_samples import dialogue, write_chat_tokenizer, write_dialogues
from tiny_runs import losses
from verbs import Ranks, job


def test_pub_071_after_fifty_steps_generation_stops_by_itself(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = job(tmp_path, num_hidden_layers=2)
    write_chat_tokenizer(tmp_path / "tokenizer", has_bos=False)
    talks = [dialogue("one", "alpha beta"), dialogue("two", "gamma"), dialogue("three", "eta")]
    write_dialogues(tmp_path / "talk.jsonl", *talks)
    settings = [f"data.train={tmp_path}/talk.jsonl", "data.format=chat", "train.steps=50"]
    more = ["train.global_batch=1", "data.sequence_length=48", "optimizer.learning_rate=1e-2"]
    ranks.done("train", path, "--plan", "tp=2", "--set", *settings, *more)
    assert losses(path)[50] < 0.05
    prompt = "<|user|>two<|end|>\n<|assistant|>"
    capfd.readouterr()
    ranks.done("generate", tmp_path / "run", "--prompt", prompt, "--max-new-tokens", "30", "--json")
    (found,) = json.loads(capfd.readouterr().out)["generations"]
    assert (found["text"], found["finish"]) == ("gamma", "stop")
