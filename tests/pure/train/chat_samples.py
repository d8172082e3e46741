"""Toy tokenizers with chat templates, on disk."""

from __future__ import annotations

import json
from pathlib import Path

from job_samples import write_text
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from triptych.train.tokenizer_training import train_tokenizer

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + PLAIN
NO_END = PLAIN.replace("<|end|>\n", " ")
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_chat_tokenizer(
    folder: Path, template: str | None = PLAIN, *, has_bos: bool = True, adds_bos: bool = True
) -> Path:
    """A byte-level tokenizer whose pad is its end token, with a template."""
    if not (folder / "tokenizer.json").is_file():
        write_text(folder / "text")
        train_tokenizer([folder / "text"], 290, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    if has_bos and adds_bos:
        bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
        tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
    } | ({"bos_token": "<|bos|>"} if has_bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def dialogue(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def write_dialogues(path: Path, *dialogues: list[dict[str, str]]) -> Path:
    """Dialogues as JSON lines."""
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in dialogues))
    return path
