"""Small stock models, and checkpoints of their weights under random layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoint_samples import layout, write_as_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
}
TOKENIZER = b'{"version": "1.0"}'
GENERATION = b'{"max_new_tokens": 7}'


def config_of(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """The config.json of a two-layer model of a family."""
    return {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        **CONFIGS[family],
        **changes,
    }


def stock_model(config: dict[str, Any], seed: int = 0) -> Any:
    """The library's model of a config with random weights, biases and norms included."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name in model.state_dict():  # the biases of DeepSeek-V3's routers
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def weights_of(model: Any, kind: str = "weight") -> dict[tuple[str, str], torch.Tensor]:
    """Its logical tensors: a tied head is not one of them."""
    return {(kind, name): p.detach() for name, p in model.named_parameters()}


def checkpoint_of(
    folder: Path,
    model: Any,
    config: dict[str, Any],
    *,
    ranks: int = 3,
    seed: int = 0,
    master: bool = False,
) -> Path:
    """A checkpoint of a model as `ranks` ranks of a random layout would write it."""
    tensors = weights_of(model)
    if master:
        halves = {key: value.bfloat16() for key, value in tensors.items()}
        tensors = halves | {("master", name): value for (_, name), value in tensors.items()}
    moments = {("exp_avg", name): torch.zeros_like(value) for (_, name), value in tensors.items()}
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": b"{}",
        "generation_config.json": GENERATION,
    }
    return write_as_ranks(folder, 10, layout(tensors | moments, seed, ranks), files)


def logits(model: Any) -> torch.Tensor:
    """Of one fixed sequence."""
    ids = torch.arange(17)[None] * 5 % model.config.vocab_size
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids).logits
    return result
