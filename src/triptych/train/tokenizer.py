"""Tokenizers: training a byte-level BPE on text, and loading one for training data.

Only the `tokenizers` library is needed; what is written loads in stock `transformers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from triptych.errors import DataError, Problem
from triptych.train.corpus import Corpus, documents, read_corpus

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """A tokenizer for training text: no special token is added but the end of a document."""

    tokenizer: tokenizers.Tokenizer
    folder: Path
    vocab_size: int  # ids are below it
    end_id: int  # end of a document
    digest: str  # of what decides the ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a Hugging Face directory. Raises DataError if there is none."""
    folder = Path(folder)
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        rule = "a tokenizer is a directory with tokenizer.json"
        works = 'set [tokenizer] path = "...", or make one with triptych.api.train_tokenizer(...)'
        raise DataError(Problem(f"no tokenizer at {folder}", rule, works))
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise DataError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end_id = _end_id(tokenizer, path.parent)
    content = f"{text}\n{end_id}"
    return TextTokenizer(
        tokenizer=tokenizer,
        folder=path.parent,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        end_id=end_id,
        digest=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
    )


def _end_id(tokenizer: tokenizers.Tokenizer, folder: Path) -> int:
    """The id of the end-of-sequence token, as `tokenizer_config.json` names it."""
    config = folder / "tokenizer_config.json"
    named: Any = (
        json.loads(config.read_text("utf-8")).get("eos_token") if config.is_file() else None
    )
    token = named.get("content") if isinstance(named, dict) else named
    for candidate in [token] if token else [END_OF_TEXT, "</s>", "<eos>"]:
        end_id = tokenizer.token_to_id(candidate)
        if end_id is not None:
            return int(end_id)
    rule = "documents are divided by the tokenizer's eos_token"
    works = f'name it in {config}: "eos_token": "..."'
    raise DataError(Problem(f"the tokenizer in {folder} has no eos_token", rule, works))


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
