"""The verbs that run something, one after the other as a newcomer types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.cli.main import run

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
JOB = """
[run]
folder = "run"
[model]
path = "config.json"
[tokenizer]
path = "tokenizer"
[data]
train = ["text"]
sequence_length = 32
[train]
steps = 2
global_batch = 4
"""


def triptych(folder: Path, *args: str, code: int = 0) -> dict[str, Any]:
    """Runs a verb with `--json`; returns its document."""
    done = subprocess.run(
        [sys.executable, "-m", "triptych", *args, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a tokenizer, a model and a job."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "text").mkdir()
    source = Path(json.__file__).read_text(encoding="utf-8")
    (folder / "text" / "json.py").write_text(source, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "job.toml").write_text(JOB)
    made = triptych(folder, "tokenizer", "text", "--vocab-size", "300", "--out", "tokenizer")
    assert made["vocab_size"] == 300
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train_resume_export_generate_and_report_work_in_a_row(folder: Path) -> None:
    first = triptych(folder, "train", "job.toml", "--plan", "tp=2")
    assert first["step"] == 2 and "tp=2" in first["plan"]
    more = ["--plan", "pp=2,microbatch=2", "--set", "train.steps=4"]
    second = triptych(folder, "train", "job.toml", *more)
    assert second["step"] == 4 and abs(second["loss"] - first["loss"]) < 0.3
    assert triptych(folder, "export", "run", "hf")["folder"] == "hf"
    prompt = ["--prompt", "import ", "--max-new-tokens", "3"]
    alone = triptych(folder, "generate", "hf", *prompt)["generations"]
    assert len(alone[0]["token_ids"]) == 3
    assert triptych(folder, "generate", "run", *prompt, "--plan", "tp=2")["generations"] == alone
    assert Path(folder, triptych(folder, "report", "run")["report"]).read_text().startswith("<!")


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", ["tp=2+1,dp=1+2,sp=1,microbatch=2", "tp=2,sp=1"])
def test_verify_finds_a_layout_equal_to_one_process(folder: Path, plan: str) -> None:
    found = triptych(folder, "verify", "config.json", "--plan", plan, "--seq", "16")
    assert found["same"] and found["relative_difference"]["gradients"] < 1e-12


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "jb.toml"], ["jb.toml", "job.toml"]),
        (["train", "job.toml", "--set", "train.step=3"], ["step", "steps"]),
        (["train", "job.toml", "--plan", "tp=3"], ["tp=3", "4 query heads and 2 KV heads"]),
        (["train", "job.toml", "--plan", "tp=2,dp=2,microbatch=3"], ["world=4", "DP=2"]),
        (["export", "nowhere", "hf2"], ["nowhere"]),
        (["generate", "nowhere", "--prompt", "a"], ["nowhere"]),
        (["report", "text"], ["text"]),
        (["verify", "config.json", "--plan", "offload=parameters"], ["offload=parameters"]),
    ],
)
def test_wrong_input_ends_with_code_2_and_nothing_written(
    folder: Path,
    args: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sorted(folder.iterdir())
    monkeypatch.chdir(folder)
    capfd.readouterr()
    assert run([*args, "--json"]) == 2
    text = json.dumps(json.loads(capfd.readouterr().out)["error"])
    assert all(word in text for word in words)
    assert sorted(folder.iterdir()) == before
