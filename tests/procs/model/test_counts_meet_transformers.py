"""Counts from a configuration equal the module that transformers builds from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from triptych.model.count import parameters
from triptych.model.hf import from_config

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
GPT = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", SIZES),
    ("llama", {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**SIZES, "num_key_value_heads": None, "head_dim": 12}),
    ("qwen2", SIZES),
    ("qwen2", {**SIZES, "tie_word_embeddings": True, "use_sliding_window": True}),
    ("qwen3", SIZES),
    ("qwen3", {**SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("mistral", SIZES),
    ("mistral", {**SIZES, "head_dim": 12, "tie_word_embeddings": True, "sliding_window": None}),
    ("mixtral", {**SIZES, "num_local_experts": 4}),
    ("qwen3_moe", {**SIZES, **EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}),
    ("qwen2_moe", {**SIZES, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 2}),
    ("qwen2_moe", {**SIZES, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}),
    ("olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    ("gemma2", {**SIZES, "head_dim": 16}),
    ("gemma3_text", {**SIZES, "head_dim": 16, "tie_word_embeddings": False}),
    ("phi3", {**SIZES, "pad_token_id": None}),
    ("olmo2", {**SIZES, "pad_token_id": None}),
    ("granite", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    ("glm4", {**SIZES, "pad_token_id": None}),
    ("glm4", {**SIZES, "pad_token_id": None, "head_dim": 16, "attention_bias": False}),
    ("smollm3", {**SIZES, "pad_token_id": None}),
    ("smollm3", {**SIZES, "pad_token_id": None, "no_rope_layers": [1, 0, 1]}),
    ("cohere", SIZES),
    ("cohere", {**SIZES, "use_qk_norm": True, "attention_bias": True}),
    ("gpt_neox", {**GPT, "intermediate_size": 96}),
    ("gpt_neox", {**GPT, "intermediate_size": 96, "attention_bias": False}),
    ("starcoder2", SIZES),
    ("starcoder2", {**SIZES, "use_bias": False, "tie_word_embeddings": False}),
    ("gpt2", {"vocab_size": 101, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 32}),
    ("gpt2", {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_inner": 50}),
    ("opt", {**GPT, "ffn_dim": 96, "max_position_embeddings": 32}),
    ("bloom", {"vocab_size": 101, "hidden_size": 64, "n_layer": 3, "n_head": 8}),
    ("falcon", GPT),
    ("falcon", {**GPT, "bias": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**GPT, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 80}),
    ("deepseek_v2", {**SIZES, **EXPERTS, **LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**SIZES, **EXPERTS, **LATENT, "q_lora_rank": 24}),
    ("gpt_oss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("llama4_text", {**SIZES, "num_local_experts": 4, "intermediate_size_mlp": 80}),
    (
        "llama4_text",
        {
            **SIZES,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_bias": True,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
        },
    ),
    ("llama4_text", {**SIZES, "moe_layers": [0, 2], "attention_chunk_size": None}),
]


def build(family: str, settings: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    config = transformers.AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        return config, transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("family", "settings"), CASES, ids=[f"{family}-{i}" for i, (family, _) in enumerate(CASES)]
)
def test_parameters_equal_the_module(family: str, settings: dict[str, Any]) -> None:
    config, module = build(family, settings)
    built = sum(parameter.numel() for parameter in module.parameters())
    assert parameters(from_config(config.to_dict(), family)) == built
    assert parameters(from_config({"model_type": family, **settings}, family)) == built


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_the_written_file_and_the_settings_give_the_same_model(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **SIZES)
    assert from_config(config.to_diff_dict(), "m") == from_config(
        {"model_type": family, **SIZES}, "m"
    )
