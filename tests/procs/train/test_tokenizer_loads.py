"""A tokenizer that we train is one that stock `transformers` loads, with the same ids."""

from __future__ import annotations

from pathlib import Path

from job_samples import write_text
from transformers import AutoTokenizer

from triptych.tokenizer.load import END_OF_TEXT, load_tokenizer
from triptych.train.tokenizer_training import train_tokenizer

TEXT = "def alpha(beta):\n    return 'gamma ü €'  # delta\n"


def test_stock_transformers_gives_the_same_ids_and_the_same_end(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    ours = load_tokenizer(train_tokenizer([tmp_path / "text"], 290, tmp_path / "tokenizer"))
    stock = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert stock(TEXT)["input_ids"] == ours.encode([TEXT])[0]
    assert stock.decode(stock(TEXT)["input_ids"]) == TEXT
    assert (stock.eos_token, stock.eos_token_id) == (END_OF_TEXT, ours.end_id)
    assert len(stock) == ours.vocab_size == 290
    assert stock(TEXT + END_OF_TEXT)["input_ids"][-1] == ours.end_id
