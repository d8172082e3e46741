"""User case PUB-027: a vocabulary that does not divide, from training to sampling.

There are no padded rows here, only uneven shares: nothing can get a probability or a gradient that
one process does not give. Losses, gradients and weights of 20 steps are compared in
`tests/procs/runtime/test_user_cases_runtime.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from logits import logits
from safetensors import safe_open
from tiny_runs import losses
from tokenizers import Tokenizer
from verbs import Ranks, job

from triptych.plan.plan import Plan, Precision, part

VOCAB = 503
SHORT = ("train.steps=3", "train.microbatch=8")


def full_tokenizer(folder: Path) -> None:
    """The tokenizer in a folder knows all 503 tokens."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    missing = VOCAB - tokenizer.get_vocab_size()
    assert tokenizer.add_tokens([f"<extra {i}>" for i in range(missing)]) == missing
    tokenizer.save(path)


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model and a tokenizer with 503 tokens."""
    folder = tmp_path_factory.mktemp("vocabulary")
    path = job(folder, vocab_size=VOCAB, num_key_value_heads=4)
    full_tokenizer(folder / "tokenizer")
    ranks.done("train", path, "--plan", "dp=1", "--set", "train.steps=1")
    return folder / "run"


@pytest.mark.parametrize("tied", [False, True])
def test_pub_027_503_tokens_are_trained_and_exported_on_four_ranks(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    """Tied and untied; the last token is 502."""
    assert len({stop - start for start, stop in (part(VOCAB, 4, i) for i in range(4))}) == 2
    path = job(tmp_path, vocab_size=VOCAB, num_key_value_heads=4, tie_word_embeddings=tied)
    full_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text" / "last.txt").write_text("<extra 212>" * 600)
    found = {}
    for tp in (4, 1):
        folder = f"run.folder={tmp_path}/run"
        ranks.done("train", path, "--plan", f"tp={tp}", "--set", folder, *SHORT)
        found[tp] = losses(path)
        (tmp_path / "run").rename(tmp_path / f"run-{tp}")
    assert found[4] == pytest.approx(found[1], abs=1e-5)
    out = tmp_path / "out"
    ranks.done("export", tmp_path / "run-4", out)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [VOCAB, 64]
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert json.loads((out / "config.json").read_text())["vocab_size"] == VOCAB


def test_pub_027_no_draw_is_beyond_the_vocabulary(
    ranks: Ranks, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four ranks, nearly uniform draws."""
    capfd.readouterr()
    draw = ["--temperature", "50", "--max-new-tokens", "12", "--plan", "tp=4", "--json"]
    prompts = [word for text in ("alpha", "beta", "gamma") for word in ("--prompt", text)]
    ranks.done("generate", run, *draw, *prompts)
    generations = json.loads(capfd.readouterr().out)["generations"]
    drawn = [token for generation in generations for token in generation["token_ids"]]
    assert len(drawn) == 36 and max(drawn) < VOCAB and len(set(drawn)) > 20


def test_pub_027_the_ranks_of_a_vocabulary_that_does_not_divide_have_the_logits_of_one_process(
    run: Path,
) -> None:
    """503 logits, for 2 and 4 ranks."""
    fp32 = Precision(parameter="fp32")
    expected = logits(run, Plan.uniform(4, precision=fp32), [502, 3, 502])
    assert expected.shape == (VOCAB,)
    for tp in (2, 4):
        found = logits(run, Plan.uniform(4, tp=tp, precision=fp32), [502, 3, 502])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
