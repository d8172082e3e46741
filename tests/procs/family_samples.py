"""Tiny configurations of every family, with each setting that changes what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from layouts import tiny_config
from transformers import (  # noqa: F401  (lazy modules: loaded once here, not once a rank)
    CohereForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    OlmoeForCausalLM,
    Phi3ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
    Starcoder2ForCausalLM,
)

from triptych.plan.families import Family

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "llama head size": {"head_dim": 24},
    "llama MHA": {"num_key_value_heads": 8},
    "llama rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
SMALL = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
MHA = {**SMALL, "num_key_value_heads": None}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT2 = {
    **MHA,
    "model_type": "gpt2",
    "n_inner": 160,
    "tie_word_embeddings": True,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.3,
}
FAMILIES |= {
    "gemma2": {
        **SMALL,
        **WINDOWS,
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma2 untied": {**SMALL, "model_type": "gemma2", "head_dim": 16},
    "gemma3_text": {
        **SMALL,
        **WINDOWS,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {**MHA, "model_type": "gpt_neox"},
    "gpt_neox in turn": {
        **MHA,
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "gpt2": GPT2,
    "gpt2 by layer": {
        **GPT2,
        "tie_word_embeddings": False,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "phi3": {**SMALL, "model_type": "phi3"},
    "phi3 window": {
        **SMALL,
        "model_type": "phi3",
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "olmo2": {**SMALL, "model_type": "olmo2"},
    "granite": {**SMALL, **GRANITE, "model_type": "granite", "tie_word_embeddings": True},
    "glm4": {**SMALL, "model_type": "glm4", "head_dim": 16},
    "smollm3": {
        **SMALL,
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        **SMALL,
        "model_type": "starcoder2",
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "cohere": {**SMALL, "model_type": "cohere", "logit_scale": 3.0, "tie_word_embeddings": True},
    "cohere norms": {
        **SMALL,
        "model_type": "cohere",
        "use_qk_norm": True,
        "attention_bias": True,
    },
}
FAMILIES |= {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral window": {
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 16,
    },
    "qwen3_moe unnormed": {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {
        **SMALL,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
    },
    "qwen2_moe window": {
        **SMALL,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
    },
    "olmoe": {**SMALL, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
}
LATENT = {
    **SMALL,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
FAMILIES |= {
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3 plain queries": {
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
LLAMA4 = {
    **SMALL,
    "model_type": "llama4_text",
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 160,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0, 1, 0],
    "floor_scale": 4,
    "attn_scale": 0.5,
}
FAMILIES |= {
    "gpt_oss": {
        **SMALL,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 8,
        "swiglu_limit": 0.2,
    },
    "gpt_oss plain": {
        **SMALL,
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
    },
    "llama4_text": {**LLAMA4, "interleave_moe_layer_step": 2},
    "llama4_text plain": {
        **LLAMA4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": None,
        "tie_word_embeddings": True,
    },
}
EXPERT_FAMILIES = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss", "llama4_text"),
)
MHA_FAMILIES = ("gpt_neox", "gpt2")
GROUPED_FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "glm4",
    "smollm3",
    "starcoder2",
    "cohere norms",
    *EXPERT_FAMILIES,
)
UNEVEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    **{name: {"hidden_size": 48, "num_attention_heads": 3} for name in MHA_FAMILIES},
    **{
        name: {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        for name in GROUPED_FAMILIES
        if name != "deepseek_v3"
    },
}


def family_config(case: str, uneven: bool = False) -> dict[str, Any]:
    """The config of a case, with 6 or 3 query heads and 3 KV heads if `uneven`."""
    return tiny_config(**FAMILIES[case] | (UNEVEN[case] if uneven else {}))


def stored_views(
    model: Any, family: Family, of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A stock model's parameters (or what is `of` them) under the names of the hub's disks.

    The library fuses experts: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]; those of GPT-OSS
    (gate and up in turn, with biases) and Llama 4 are transposed.
    """
    found = {}
    kind = model.config.model_type
    for name, parameter in model.named_parameters():
        values = of(parameter)
        trunk, is_fused, word = name.rpartition(".experts.")
        if not is_fused:
            found[family.logical_name(name)] = values
            continue
        for index, expert in enumerate(values):
            if kind in ("gpt_oss", "llama4_text"):
                expert = expert.T if expert.dim() == 2 else expert
            for part_name, part in _expert_parts(word, expert, in_turn=kind == "gpt_oss"):
                found[family.logical_name(f"{trunk}.experts.{index}.{part_name}")] = part
    return found


def _expert_parts(word: str, expert: torch.Tensor, in_turn: bool) -> list[tuple[str, torch.Tensor]]:
    """What of one expert is fused in a tensor, by its own name; outputs come first."""
    kind = "bias" if word.endswith("_bias") else "weight"
    if not word.startswith("gate_up_proj"):
        return [(f"down_proj.{kind}", expert)]
    gate, up = (expert[::2], expert[1::2]) if in_turn else expert.chunk(2)
    return [(f"gate_proj.{kind}", gate), (f"up_proj.{kind}", up)]
