"""Families with experts: Mixtral, Qwen MoE, OLMoE, GPT-OSS, Llama 4, DeepSeek's with latents."""

from __future__ import annotations

from dataclasses import replace

from triptych.model.families.trunk import (
    Trunk,
    assemble,
    grouped,
    layer_windows,
    read_trunk,
    rotary_layers,
    with_windows,
)
from triptych.model.keys import ConfigKeys
from triptych.model.model import Attention, Block, Experts, Latent, Mlp, Model


def mixtral(keys: ConfigKeys) -> Model:
    """Mixtral: every layer has experts of `intermediate_size`."""
    trunk = read_trunk(keys)
    experts = Experts(
        count=keys.count("num_local_experts", "num_experts", default=8),
        top_k=keys.count("num_experts_per_tok", default=2),
        width=keys.count("intermediate_size"),
    )
    attention = grouped(keys, trunk, kv_heads=8, window=keys.optional_count("sliding_window"))
    block = Block(attention=attention, mlp=experts)
    return assemble(keys, trunk, [block] * trunk.layers, positions=131072)


def qwen3_moe(keys: ConfigKeys) -> Model:
    """Qwen 3 with experts in every `decoder_sparse_step`-th layer not in `mlp_only_layers`."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    window = keys.optional_count("sliding_window", default=4096)
    attention = grouped(
        keys,
        trunk,
        kv_heads=4,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=window if keys.flag("use_sliding_window") else None,
    )
    experts = Experts(
        count=keys.count("num_experts", "num_local_experts", default=128),
        top_k=keys.count("num_experts_per_tok", default=8),
        width=keys.count("moe_intermediate_size", default=768),
    )
    blocks = [
        Block(attention=attention, mlp=dense or experts) for dense in _sparse_layers(keys, trunk)
    ]
    return assemble(keys, trunk, blocks, positions=32768)


def qwen2_moe(keys: ConfigKeys) -> Model:
    """Qwen 2 (and 1.5) with routed experts and a shared one, which a gate of its own weighs."""
    trunk = read_trunk(keys)
    first = keys.count("max_window_layers", default=28, minimum=0)
    slides = keys.flag("use_sliding_window")
    window = keys.optional_count("sliding_window", default=4096) if slides else None
    windows = layer_windows(keys, trunk, window, lambda index: index % 2 == 0 and index < first)
    attention = grouped(keys, trunk, kv_heads=16, qkv_bias=keys.flag("qkv_bias", True))
    experts = Experts(
        count=keys.count("num_experts", "num_local_experts", default=60),
        top_k=keys.count("num_experts_per_tok", default=4),
        width=keys.count("moe_intermediate_size", default=1408),
        shared_width=keys.count("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    blocks = [
        Block(attention=layer, mlp=dense or experts)
        for layer, dense in zip(
            with_windows(attention, windows), _sparse_layers(keys, trunk), strict=True
        )
    ]
    return assemble(keys, trunk, blocks, positions=32768)


def _sparse_layers(keys: ConfigKeys, trunk: Trunk) -> list[Mlp | None]:
    """The dense MLP of each layer of Qwen's that has one, None where it has experts."""
    step = keys.count("decoder_sparse_step", default=1)
    dense_layers = set(keys.layer_indices("mlp_only_layers"))
    dense = Mlp(width=keys.count("intermediate_size"))
    return [
        dense if index in dense_layers or (index + 1) % step else None
        for index in range(trunk.layers)
    ]


def olmoe(keys: ConfigKeys) -> Model:
    """OLMoE: every layer has experts; one norm over all query heads and one over all key heads."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(
        keys, trunk, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_kind="joint"
    )
    experts = Experts(
        count=keys.count("num_experts", "num_local_experts", default=64),
        top_k=keys.count("num_experts_per_tok", default=8),
        width=keys.count("intermediate_size"),
    )
    block = Block(attention=attention, mlp=experts)
    return assemble(keys, trunk, [block] * trunk.layers, positions=4096)


def gpt_oss(keys: ConfigKeys) -> Model:
    """GPT-OSS: biases everywhere, one sink logit a head, every other layer windowed."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias", True)
    attention = grouped(
        keys, trunk, kv_heads=8, head_dim=64, qkv_bias=bias, out_bias=bias, sinks=True
    )
    window = keys.optional_count("sliding_window", default=128)
    windows = layer_windows(keys, trunk, window, lambda index: index % 2 == 0)
    experts = Experts(
        count=keys.count("num_local_experts", "num_experts", default=128),
        top_k=keys.count("num_experts_per_tok", "experts_per_token", default=4),
        width=keys.count("intermediate_size"),
        bias=True,
    )
    blocks = [Block(attention=layer, mlp=experts) for layer in with_windows(attention, windows)]
    return assemble(keys, trunk, blocks, positions=131072)


def llama4(keys: ConfigKeys) -> Model:
    """Llama 4 (text): experts in every `interleave_moe_layer_step`-th layer, one of them shared.

    Layers that rotate see chunks and norm their heads without weights; the others see everything,
    with queries scaled by their position.
    """
    trunk = read_trunk(keys)
    bias, normed = keys.flag("attention_bias"), keys.flag("use_qk_norm", True)
    tempered = keys.flag("attn_temperature_tuning", True)
    plain = grouped(keys, trunk, kv_heads=8, head_dim=128, qkv_bias=bias, out_bias=bias)
    rotary = rotary_layers(keys, trunk)
    chunk = keys.optional_count("attention_chunk_size", default=8192)
    chunks = layer_windows(keys, trunk, chunk, rotary.__getitem__, "chunked_attention")
    kinds = {
        kind: replace(
            plain,
            rotary=kind[0],
            chunk=kind[1],
            qk_norm=normed and kind[0],
            qk_norm_kind="unweighted",
            tempered=tempered and not kind[0],
        )
        for kind in set(zip(rotary, chunks, strict=True))
    }
    width = keys.count("intermediate_size")
    experts = Experts(
        count=keys.count("num_local_experts", "num_experts", default=16),
        top_k=keys.count("num_experts_per_tok", default=1),
        width=width,
        shared_width=width,
    )
    dense = Mlp(width=keys.count("intermediate_size_mlp", default=16384))
    sparse = _llama4_sparse_layers(keys, trunk)
    blocks = [
        Block(attention=kinds[kind], mlp=experts if index in sparse else dense)
        for index, kind in enumerate(zip(rotary, chunks, strict=True))
    ]
    return assemble(keys, trunk, blocks, positions=131072)


def _llama4_sparse_layers(keys: ConfigKeys, trunk: Trunk) -> set[int]:
    """The layers with experts: as listed, else every n-th."""
    step = keys.count("interleave_moe_layer_step", default=1)
    if keys.has("moe_layers"):
        return set(keys.layer_indices("moe_layers"))
    return set(range(step - 1, trunk.layers, step))


def deepseek_v2(keys: ConfigKeys) -> Model:
    """DeepSeek-V2 and V2-Lite; `q_lora_rank: null` means that queries are projected directly."""
    top_k = keys.count("num_experts_per_tok")
    return _deepseek(keys, top_k=top_k, counts=(64, 2), width=1407, dense_layers=0, positions=2048)


def deepseek_v3(keys: ConfigKeys) -> Model:
    """DeepSeek-V3 without its multi-token-prediction module, which is no part of the decoder.

    The router's correction bias is a buffer, not a parameter.
    """
    top_k = keys.count("num_experts_per_tok", default=8)
    return _deepseek(keys, top_k=top_k, counts=(256, 1), width=2048, dense_layers=3, positions=4096)


def _deepseek(
    keys: ConfigKeys,
    *,
    top_k: int,
    counts: tuple[int, int],
    width: int,
    dense_layers: int,
    positions: int,
) -> Model:
    """`counts` (routed, shared experts), expert `width` and the rest are the family's defaults."""
    trunk = read_trunk(keys)
    expert_width = keys.count("moe_intermediate_size", default=width)
    shared = keys.count("n_shared_experts", default=counts[1], minimum=0)
    experts = Experts(
        count=keys.count("n_routed_experts", "num_experts", default=counts[0]),
        top_k=top_k,
        width=expert_width,
        shared_width=shared * expert_width,
    )
    dense = Mlp(width=keys.count("intermediate_size"))
    first = keys.count("first_k_dense_replace", default=dense_layers, minimum=0)
    attention = _latent_attention(keys, trunk.heads)
    blocks = [
        Block(attention=attention, mlp=dense if index < first else experts)
        for index in range(trunk.layers)
    ]
    unreliable = tuple(
        f"{key} is set: the biases are not counted"
        for key in ("attention_bias", "mlp_bias")
        if keys.flag(key)
    )
    return assemble(keys, trunk, blocks, positions=positions, unreliable=unreliable)


def _latent_attention(keys: ConfigKeys, heads: int) -> Attention:
    """Latent attention; the cache holds one latent, the attention works on `heads` of each."""
    latent = Latent(
        query_rank=keys.optional_count("q_lora_rank", default=1536),
        kv_rank=keys.count("kv_lora_rank", default=512),
        nope_dim=keys.count("qk_nope_head_dim", default=128),
        rope_dim=keys.count("qk_rope_head_dim", default=64),
        value_dim=keys.count("v_head_dim", default=128),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return Attention(query_heads=heads, kv_heads=heads, head_dim=head_dim, latent=latent)
