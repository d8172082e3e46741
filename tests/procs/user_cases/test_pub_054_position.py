"""User case PUB-054: a resumed run goes on with the samples that the stopped one had left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import losses
from verbs import Ranks, job

SETTINGS = ("train.global_batch=4", "optimizer.schedule=constant", "checkpoint.every=7")


def mixed_job(folder: Path, pack: str) -> Path:
    """A job over two sources of 20 short documents each; `streaming` ones are two files each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = job(folder, num_hidden_layers=2)
    for name in ("a", "b"):
        rows = [{"text": f"{name}{i} " * (1 + i % 3)} for i in range(20)]
        for part in (0, 1):
            lines = map(json.dumps, rows[part::2])
            (folder / f"{name}{part}.jsonl").write_text("\n".join(lines))
    text = path.read_text().replace(f'train = ["{folder}/text"]', "")
    how = "streaming = true" if pack == "streaming" else f'pack = "{pack}"'
    sources = "".join(
        f'[[data.mixture]]\ntrain = "{folder}/{name}*.jsonl"\nweight = {weight}\n{how}\n'
        for name, weight in (("a", 3), ("b", 1))
    )
    path.write_text(text + sources)
    return path


@pytest.mark.parametrize("pack", ["whole", "single", "streaming"])
def test_pub_054_a_resumed_mixture_has_the_losses_of_the_unbroken_run(
    ranks: Ranks, tmp_path: Path, pack: str
) -> None:
    """Stopped after step 7 under DP2, gone on with under DP4; several epochs of both sources."""
    path = mixed_job(tmp_path, pack)
    ranks.done("train", path, "--plan", "dp=1", "--set", *SETTINGS, "train.steps=12")
    whole = losses(path)
    shutil.rmtree(tmp_path / "run")
    ranks.done("train", path, "--plan", "dp=2", "--set", *SETTINGS, "train.steps=7")
    ended = ranks.done("train", path, "--plan", "dp=4", "--set", *SETTINGS, "train.steps=12")
    assert "after step 7" in ended.err
    assert losses(path) == pytest.approx(whole, abs=1e-5)
    assert len(set(whole.values())) == 12
