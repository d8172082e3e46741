"""Families with RMSNorm, rotary positions and a gated dense MLP: Llama and its relatives."""

from __future__ import annotations

from collections.abc import Callable
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
from triptych.model.model import Attention, Block, Mlp, Model


def llama(keys: ConfigKeys) -> Model:
    """Llama 1 to 3 and what reuses its class (SmolLM2, Yi, ...)."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(keys, trunk, qkv_bias=bias, out_bias=bias)
    mlp = Mlp(width=keys.count("intermediate_size"), bias=keys.flag("mlp_bias"))
    return assemble(keys, trunk, [Block(attention=attention, mlp=mlp)] * trunk.layers)


def mistral(keys: ConfigKeys) -> Model:
    """Mistral; an absent `sliding_window` means 4096, `null` means none."""
    trunk = read_trunk(keys)
    window = keys.optional_count("sliding_window", default=4096)
    block = Block(
        attention=grouped(keys, trunk, kv_heads=8, window=window),
        mlp=Mlp(width=keys.count("intermediate_size")),
    )
    return assemble(keys, trunk, [block] * trunk.layers, positions=131072)


def qwen2(keys: ConfigKeys) -> Model:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    trunk = read_trunk(keys)
    attention = grouped(keys, trunk, kv_heads=32, qkv_bias=True)
    return _qwen_dense(keys, trunk, attention)


def qwen3(keys: ConfigKeys) -> Model:
    """Qwen 3: a norm on each query and key head, head width apart from the hidden size."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(
        keys, trunk, kv_heads=32, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    return _qwen_dense(keys, trunk, attention)


def _qwen_dense(keys: ConfigKeys, trunk: Trunk, attention: Attention) -> Model:
    """Windows count only with `use_sliding_window`, and from layer `max_window_layers` on."""
    first = keys.count("max_window_layers", default=28, minimum=0)
    window = keys.optional_count("sliding_window", default=4096)
    used = window if keys.flag("use_sliding_window") else None
    windows = layer_windows(keys, trunk, used, lambda index: index >= first)
    mlp = Mlp(width=keys.count("intermediate_size"))
    blocks = [Block(attention=layer, mlp=mlp) for layer in with_windows(attention, windows)]
    return assemble(keys, trunk, blocks, positions=32768)


def gemma2(keys: ConfigKeys) -> Model:
    """Gemma 2: four norms a layer, every other layer windowed, tied."""
    trunk = read_trunk(keys)
    softcapped = keys.number("attn_logit_softcapping", 50.0) > 0
    return _gemma(keys, trunk, lambda index: index % 2 == 0, positions=8192, softcapped=softcapped)


def gemma3(keys: ConfigKeys) -> Model:
    """Gemma 3 (text): Gemma 2 with query and key norms; five of six layers windowed.

    Hub files leave out heads and vocabulary where they equal the class's (8, 4, 262208).
    """
    trunk = read_trunk(keys, heads=8, vocab=262208)
    period = keys.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _gemma(
        keys, trunk, lambda index: bool((index + 1) % period), positions=131072, qk_norm=True
    )


def _gemma(
    keys: ConfigKeys,
    trunk: Trunk,
    is_sliding: Callable[[int], bool],
    *,
    positions: int,
    qk_norm: bool = False,
    softcapped: bool = False,
) -> Model:
    bias = keys.flag("attention_bias")
    attention = grouped(
        keys,
        trunk,
        kv_heads=4,
        head_dim=256,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        softcapped=softcapped,
    )
    window = keys.optional_count("sliding_window", default=4096)
    windows = layer_windows(keys, trunk, window, is_sliding)
    mlp = Mlp(width=keys.count("intermediate_size"))
    blocks = [
        Block(attention=layer, mlp=mlp, norms=4) for layer in with_windows(attention, windows)
    ]
    return assemble(keys, trunk, blocks, tied=True, positions=positions)


def phi3(keys: ConfigKeys) -> Model:
    """Phi-3 and Phi-4: Llama with fused projections (the same count)."""
    trunk = read_trunk(keys)
    block = Block(
        attention=grouped(keys, trunk, window=keys.optional_count("sliding_window")),
        mlp=Mlp(width=keys.count("intermediate_size")),
    )
    dropout = keys.number("resid_pdrop") > 0
    return assemble(keys, trunk, [block] * trunk.layers, positions=4096, dropout=dropout)


def olmo2(keys: ConfigKeys) -> Model:
    """OLMo 2: norms behind the branches only, and over all query and all key heads together."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(
        keys, trunk, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_kind="joint"
    )
    mlp = Mlp(width=keys.count("intermediate_size"))
    block = Block(attention=attention, mlp=mlp, output_norms=True)
    return assemble(keys, trunk, [block] * trunk.layers)


def glm4(keys: ConfigKeys) -> Model:
    """GLM-4 (0414): norms before and behind both branches, fused gate and up."""
    trunk = read_trunk(keys)
    attention = grouped(
        keys, trunk, kv_heads=2, head_dim=128, qkv_bias=keys.flag("attention_bias", True)
    )
    block = Block(attention=attention, mlp=Mlp(width=keys.count("intermediate_size")), norms=4)
    return assemble(keys, trunk, [block] * trunk.layers, positions=131072)


def smollm3(keys: ConfigKeys) -> Model:
    """SmolLM 3: every fourth layer without rotary positions; only those may have a window."""
    trunk = read_trunk(keys)
    bias = keys.flag("attention_bias")
    attention = grouped(keys, trunk, kv_heads=4, qkv_bias=bias, out_bias=bias)
    rotary = rotary_layers(keys, trunk)
    used = keys.optional_count("sliding_window") if keys.flag("use_sliding_window") else None
    windows = layer_windows(keys, trunk, used, lambda index: not rotary[index])
    mlp = Mlp(width=keys.count("intermediate_size"), bias=keys.flag("mlp_bias"))
    kinds = {
        kind: Block(attention=replace(attention, window=kind[0], rotary=kind[1]), mlp=mlp)
        for kind in set(zip(windows, rotary, strict=True))
    }
    blocks = [kinds[kind] for kind in zip(windows, rotary, strict=True)]
    return assemble(keys, trunk, blocks, tied=True, positions=32768)


def cohere(keys: ConfigKeys) -> Model:
    """Command R: attention beside the MLP behind one norm without bias, tied."""
    trunk = read_trunk(keys)
    bias, normed = keys.flag("attention_bias"), keys.flag("use_qk_norm")
    attention = grouped(
        keys, trunk, qkv_bias=bias, out_bias=bias, qk_norm=normed, qk_norm_kind="per head"
    )
    block = Block(attention=attention, mlp=Mlp(width=keys.count("intermediate_size")), norms=1)
    return assemble(keys, trunk, [block] * trunk.layers, tied=True, positions=8192)
