"""Small stock models with a byte-level tokenizer, as directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
}
PROMPTS = ["def naïve(x):", "日本", "import os; os.path.join('a', 'b')"]


def byte_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """Byte-level BPE with a few merges and an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        PROMPTS * 9 + ["import return self for in range len"] * 9, trainer
    )
    return tokenizer


def config_of(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Four layers, 6 query and 3 KV heads, more rows than the tokenizer has tokens."""
    return {
        "model_type": family,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 311,
        "max_position_embeddings": 96,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **FAMILIES[family],
        **changes,
    }


def stock_model(config: dict[str, Any], seed: int = 0) -> Any:
    """The library's model with large random weights, so that the likeliest token is clear."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = 1.0 if parameter.dim() == 1 else 0.25
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
    return model


def save_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Any:
    """A Hugging Face directory of a stock model with our tokenizer; the model."""
    model = stock_model(config, seed)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


def set_end_token(folder: Path, token_id: int) -> None:
    """The folder's generation_config.json names a token that ends a text."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token_id]}))


def stock_greedy(model: Any, ids: list[int], count: int, limit: int) -> list[int]:
    """Greedy tokens below `limit` from the stock model, the whole text anew for every token."""
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits[:limit].argmax()))
    return ids[-count:]
