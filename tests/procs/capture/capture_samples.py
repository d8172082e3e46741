"""Small configurations of families that no description covers, as the library knows them."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_inner": 160,
    "n_positions": 128,
    "vocab_size": 512,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}

OUTSIDE: dict[str, dict[str, Any]] = {
    "stablelm": {**SIZES, "use_qkv_bias": True},
    "persimmon": SIZES,
    "phi": SIZES,
    "gptj": {**GPT_SIZES, "rotary_dim": 4},
    "codegen": {**GPT_SIZES, "n_ctx": 128, "rotary_dim": 4},
    "gpt_bigcode": GPT_SIZES,
    "olmo": SIZES,
    "olmo3": {**SIZES, "sliding_window": 8},
    "exaone4": {**SIZES, "sliding_window": 8},
    "ernie4_5": {**SIZES, "head_dim": 8},
    "seed_oss": {**SIZES, "head_dim": 8},
    "nemotron": {**SIZES, "head_dim": 8},
    "helium": {**SIZES, "head_dim": 8},
    "arcee": SIZES,
    "granitemoe": {**SIZES, **EXPERTS},
    "phimoe": {**SIZES, **EXPERTS},
    "minimax_m2": {**SIZES, **EXPERTS, "head_dim": 8},
    "glm4_moe": {
        **SIZES,
        **EXPERTS,
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""By `model_type`."""


def outside_config(family: str) -> dict[str, Any]:
    """The `config.json` of a family."""
    return {"model_type": family, **OUTSIDE[family]}
