"""A small job on disk, for tests that change one thing in it."""

from __future__ import annotations

from pathlib import Path

from triptych.train.tokenizer_training import train_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]

JOB = """\
[run]
folder = "{folder}/run"

[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 2

[tokenizer]
path = "{folder}/tokenizer"

[data]
train = ["{folder}/text"]
sequence_length = 16

[train]
steps = 4
global_batch = 8
"""


def write_text(folder: Path, documents: int = 12, lines: int = 40) -> list[Path]:
    """Text files with lines of words, all different."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for d in range(documents):
        rows = [
            " ".join(WORDS[(d + 3 * line + w * (line + 1)) % len(WORDS)] for w in range(8))
            for line in range(lines)
        ]
        path = folder / f"document-{d:02d}.txt"
        path.write_text("\n".join(rows) + "\n")
        paths.append(path)
    return paths


def write_job(folder: Path, text: str = JOB) -> Path:
    """A job with its text and tokenizer below `folder`."""
    write_text(folder / "text")
    train_tokenizer([folder / "text"], 290, folder / "tokenizer")
    path = folder / "job.toml"
    path.write_text(text.format(folder=folder))
    return path
