"""The tokenizer of a Hugging Face directory, as training data needs it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from triptych.errors import DataError, Problem

END_OF_TEXT = "<|endoftext|>"
_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """A tokenizer for training text: it adds to a document what it adds to a text of its own
    accord at the beginning (`start_ids`, the begin-of-text token of many), and ends it with
    `end_id`.
    """

    tokenizer: tokenizers.Tokenizer
    folder: Path
    vocab_size: int  # ids are below it
    end_id: int  # end of a document
    start_ids: tuple[int, ...]  # one id or none
    digest: str  # of what decides the ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; on all cores."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a Hugging Face directory. Raises DataError if there is none."""
    folder = Path(folder)
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        rule = "a tokenizer is a directory with tokenizer.json"
        works = 'set [tokenizer] path = "...", or make one with `triptych tokenizer`'
        raise DataError(Problem(f"no tokenizer at {folder}", rule, works))
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise DataError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(path.parent / _CONFIG)
    end_id, start_ids = _end_id(tokenizer, config, path.parent), _start_ids(tokenizer, config)
    content = f"{text}\n{end_id} {start_ids}"
    return TextTokenizer(
        tokenizer=tokenizer,
        folder=path.parent,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        end_id=end_id,
        start_ids=start_ids,
        digest=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
    )


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """A special token such as `eos_token` as a tokenizer's configuration names it."""
    named: Any = config.get(name)
    token = named.get("content") if isinstance(named, dict) else named
    return token if isinstance(token, str) and token else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file. Raises DataError for anything else."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path} is not a JSON object")
    return values


def _end_id(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> int:
    """The id of the end-of-sequence token, as `tokenizer_config.json` names it."""
    token = special_token(config, "eos_token")
    candidates: Iterable[str] = [token] if token else [END_OF_TEXT, "</s>", "<eos>"]
    for candidate in candidates:
        end_id = tokenizer.token_to_id(candidate)
        if end_id is not None:
            return int(end_id)
    rule = "documents are divided by the tokenizer's eos_token"
    works = f'name it in {folder / _CONFIG}: "eos_token": "..."'
    raise DataError(Problem(f"the tokenizer in {folder} has no eos_token", rule, works))


def _start_ids(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The begin-of-text token, if the tokenizer sets it before a text of its own accord."""
    token = special_token(config, "bos_token")
    added = tokenizer.encode("", add_special_tokens=True).ids
    if token is None or not added or added[0] != tokenizer.token_to_id(token):
        return ()
    return (int(added[0]),)
