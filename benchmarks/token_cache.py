"""Seconds to turn text into a token cache, ours beside `datasets.map` with a process on each core.

Both read the same documents (the Python standard library's sources as JSON lines) with the same
tokenizer and end with tokens on disk; they must have as many. Each starts from the file.

    python benchmarks/token_cache.py [--mib 16] [--json]
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars, load_dataset

from sides.rows import ratio_row, show
from triptych.cluster.machine import usable_cores
from triptych.tokenizer.load import load_tokenizer
from triptych.train.corpus import read_corpus
from triptych.train.encode import TextEncoder
from triptych.train.tokenizer_training import train_tokenizer
from triptych.train.tokens import build_tokens

PAIRS = 3


def write_text(path: Path, mib: int) -> None:
    """JSON lines of so many MiB: the sources over and over."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [p.read_text("utf-8", "replace") for p in sorted(library.glob("*.py"))]
    with path.open("w") as stream:
        number = 0
        while stream.tell() < mib << 20:
            text = f"# {number}\n{sources[number % len(sources)]}"
            stream.write(json.dumps({"text": text}) + "\n")
            number += 1


def ours(text: Path, tokenizer: Path, out: Path) -> tuple[float, int]:
    """Seconds and tokens of our cache."""
    begun_s = time.perf_counter()
    corpus = read_corpus([str(text)])
    tokens = build_tokens(out, corpus, TextEncoder(load_tokenizer(tokenizer)))
    return time.perf_counter() - begun_s, tokens.num_tokens


def theirs(text: Path, tokenizer: Path, out: Path) -> tuple[float, int]:
    """Seconds and tokens of the library's map."""
    begun_s = time.perf_counter()
    loaded = load_tokenizer(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [[*ids, loaded.end_id] for ids in loaded.encode(batch["text"])]}

    rows = load_dataset("json", data_files=str(text), cache_dir=str(out), split="train")
    made = rows.map(encode, batched=True, num_proc=usable_cores(), remove_columns=["text"])
    made.save_to_disk(str(out / "tokens"))
    seconds = time.perf_counter() - begun_s
    return seconds, sum(len(ids) for ids in made["ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    disable_progress_bars()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder, "text.jsonl"), Path(folder, "tokenizer")
        write_text(text, 1)
        train_tokenizer([text], 8192, tokenizer)
        write_text(text, options.mib)
        for number in range(PAIRS):
            mine, count = ours(text, tokenizer, Path(folder, f"ours-{number}"))
            other, same = theirs(text, tokenizer, Path(folder, f"theirs-{number}"))
            assert count == same, f"{count} tokens of ours, {same} of theirs"
            pairs.append((mine, other))
    claim = f"{options.mib} MiB of text to tokens on disk"
    show([ratio_row(claim, "datasets.map", "s", pairs)], options.json)


if __name__ == "__main__":
    main()
