"""Training a byte-level BPE tokenizer on text.

Only the `tokenizers` library is needed; what is written loads in stock `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from triptych.errors import DataError, Problem
from triptych.tokenizer.load import END_OF_TEXT
from triptych.train.corpus import Corpus, documents, read_corpus

_BYTES = 256


def train_tokenizer(
    files: Sequence[str | Path],
    vocab_size: int,
    out_dir: str | Path,
    *,
    exclude: Sequence[str] = (),
    text_key: str = "text",
) -> Path:
    """A byte-level BPE tokenizer of `vocab_size` tokens in `out_dir`, a Hugging Face directory.

    Files may be directories or globs, as in a job's `[data] train`; the vocabulary includes
    `<|endoftext|>` (id 0) and the 256 bytes.

    Raises DataError if the text has too little in it for that many tokens.
    """
    if vocab_size <= _BYTES:
        rule = "a byte-level vocabulary holds the 256 bytes and the end of text"
        raise DataError(Problem(f"vocabulary of {vocab_size}", rule, f"{_BYTES + 1} or more"))
    corpus = read_corpus([str(f) for f in files], exclude=exclude, text_key=text_key)
    tokenizer = _trained(corpus, vocab_size)
    learned = tokenizer.get_vocab_size()
    if learned < vocab_size:
        what = f"{corpus.size_bytes} bytes of text make {learned} tokens, not {vocab_size}"
        raise DataError(Problem(what, "each token is seen in the text", f"vocabulary of {learned}"))
    return _write(tokenizer, Path(out_dir))


def _trained(corpus: Corpus, vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    return tokenizer


def _texts(corpus: Corpus) -> Iterator[str]:
    return (piece.text for piece in documents(corpus))


def _write(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
