"""Families with LayerNorm and a plain MLP: GPT-2, GPT-NeoX, OPT, BLOOM, Falcon, StarCoder 2."""

from __future__ import annotations

from triptych.model.families.trunk import (
    HIDDEN,
    KV_HEADS,
    Trunk,
    assemble,
    grouped,
    read_trunk,
)
from triptych.model.keys import ConfigKeys
from triptych.model.model import Attention, Block, Mlp, Model


def gpt2(keys: ConfigKeys) -> Model:
    """GPT-2, and the GPT-3 and Megatron shapes: learned positions, biases everywhere, tied."""
    trunk = read_trunk(keys)
    width = keys.count("n_inner", "intermediate_size", default=4 * trunk.hidden)
    dropout = keys.number("attn_pdrop", 0.1) > 0
    block = Block(
        attention=grouped(keys, trunk, qkv_bias=True, out_bias=True, rotary=False, dropout=dropout),
        mlp=Mlp(width=width, gated=False, bias=True),
        norm_bias=True,
    )
    return assemble(
        keys,
        trunk,
        [block] * trunk.layers,
        tied=True,
        positions=1024,
        learned_positions=True,
        final_norm_bias=True,
        dropout=keys.number("resid_pdrop", 0.1) > 0,
    )


def gpt_neox(keys: ConfigKeys) -> Model:
    """GPT-NeoX and Pythia: rotary positions, attention beside the MLP, a norm for each."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias", True)
    block = Block(
        attention=grouped(keys, trunk, qkv_bias=bias, out_bias=bias),
        mlp=Mlp(width=keys.count("intermediate_size"), gated=False, bias=True),
        norm_bias=True,
    )
    dropout = keys.number("hidden_dropout") > 0
    return assemble(keys, trunk, [block] * trunk.layers, final_norm_bias=True, dropout=dropout)


def starcoder2(keys: ConfigKeys) -> Model:
    """StarCoder 2: rotary positions, grouped-query attention, biases everywhere, tied."""
    trunk = read_trunk(keys)
    bias = keys.flag("use_bias", True)
    window = keys.optional_count("sliding_window")
    block = Block(
        attention=grouped(keys, trunk, kv_heads=2, qkv_bias=bias, out_bias=bias, window=window),
        mlp=Mlp(width=keys.count("intermediate_size"), gated=False, bias=bias),
        norm_bias=True,
    )
    return assemble(
        keys,
        trunk,
        [block] * trunk.layers,
        tied=True,
        positions=4096,
        final_norm_bias=True,
        dropout=keys.number("residual_dropout") > 0,
    )


def opt(keys: ConfigKeys) -> Model:
    """OPT: GPT-2 with two more rows of positions; 350M, which norms afterwards, is marked."""
    trunk = read_trunk(keys)
    bias = keys.flag("enable_bias", True)
    block = Block(
        attention=grouped(keys, trunk, qkv_bias=bias, out_bias=bias, rotary=False),
        mlp=Mlp(width=keys.count("ffn_dim", "intermediate_size"), gated=False, bias=bias),
        norm_bias=True,
    )
    return assemble(
        keys,
        trunk,
        [block] * trunk.layers,
        tied=True,
        learned_positions=True,
        position_offset=2,
        final_norm_bias=True,
        dropout=keys.number("dropout", 0.1) > 0,
        unreliable=_opt_oddities(keys, trunk),
    )


def _opt_oddities(keys: ConfigKeys, trunk: Trunk) -> tuple[str, ...]:
    """What the 350M model (and only it) does otherwise."""
    reasons = []
    if keys.count("word_embed_proj_dim", default=trunk.hidden) != trunk.hidden:
        reasons.append("word_embed_proj_dim differs from hidden_size: the projections are missing")
    if not keys.flag("do_layer_norm_before", True):
        reasons.append("do_layer_norm_before is false: there is no final norm, but one is counted")
    if not keys.flag("layer_norm_elementwise_affine", True):
        reasons.append("layer_norm_elementwise_affine is false: norms have no weights, but count")
    return tuple(reasons)


def bloom(keys: ConfigKeys) -> Model:
    """BLOOM: ALiBi, a norm behind the embedding, MLP of four times the hidden size, tied."""
    trunk = read_trunk(keys)
    block = Block(
        attention=grouped(keys, trunk, qkv_bias=True, out_bias=True, rotary=False),
        mlp=Mlp(width=4 * trunk.hidden, gated=False, bias=True),
        norm_bias=True,
    )
    return assemble(
        keys,
        trunk,
        [block] * trunk.layers,
        tied=True,
        embedding_norm=True,
        final_norm_bias=True,
        dropout=keys.number("hidden_dropout") > 0,
    )


def falcon(keys: ConfigKeys) -> Model:
    """Falcon: attention beside MLP; multi-query (7B) or the newer grouped form (40B, 180B)."""
    trunk = read_trunk(keys)
    bias = keys.flag("bias")
    mlp = Mlp(width=keys.count("ffn_hidden_size", default=4 * trunk.hidden), gated=False, bias=bias)
    block = Block(
        attention=_falcon_attention(keys, trunk, bias),
        mlp=mlp,
        norms=_falcon_norms(keys),
        norm_bias=True,
    )
    return assemble(
        keys,
        trunk,
        [block] * trunk.layers,
        tied=True,
        final_norm_bias=True,
        dropout=keys.number("hidden_dropout") > 0,
    )


def _falcon_attention(keys: ConfigKeys, trunk: Trunk, bias: bool) -> Attention:
    """Key/value heads: `num_kv_heads` in the new form, else one (multi-query) or all."""
    keys.require_multiple((HIDDEN[0], "num_attention_heads"), (trunk.hidden, trunk.heads))
    kv_heads = trunk.heads
    if keys.flag("new_decoder_architecture"):
        kv_heads = keys.count("num_kv_heads", *KV_HEADS, default=trunk.heads)
    elif keys.flag("multi_query", True):
        kv_heads = 1
    return Attention(
        query_heads=trunk.heads,
        kv_heads=kv_heads,
        head_dim=max(trunk.hidden // trunk.heads, 1),
        qkv_bias=bias,
        out_bias=bias,
        rotary=not keys.flag("alibi"),
    )


def _falcon_norms(keys: ConfigKeys) -> int:
    """Norms of a layer: two unless attention and MLP, side by side, share one."""
    if not keys.flag("parallel_attn", True):
        return 2
    default = 2 if keys.flag("new_decoder_architecture") else 1
    return keys.count("num_ln_in_parallel_attn", default=default)
