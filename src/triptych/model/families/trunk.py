"""What all families share: common sizes, grouped attention, windows, the model value.

Defaults are those of the configuration classes in transformers 5.24: hub files leave out what
equals them. Hidden size, layers, heads, MLP width and vocabulary have no honest default and are
required, except where the hub's own files lean on one (Gemma 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triptych.model.keys import ConfigKeys
from triptych.model.model import Attention, Block, Model

MAX_LAYERS = 10_000  # beyond it the number is a mistake, and a block each would fill the memory

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """What every family states."""

    hidden: int
    layers: int
    heads: int
    vocab: int


def read_trunk(keys: ConfigKeys, *, heads: int | None = None, vocab: int | None = None) -> Trunk:
    """Reads the common sizes; `heads` and `vocab` are the family's defaults, if it has them."""
    layers = keys.count(*LAYERS)
    if layers > MAX_LAYERS:
        keys.wrong("num_hidden_layers", layers, f"at most {MAX_LAYERS}")
        layers = 1
    return Trunk(
        hidden=keys.count(*HIDDEN),
        layers=layers,
        heads=keys.count(*HEADS, default=heads),
        vocab=keys.count("vocab_size", default=vocab),
    )


def _head_dim(keys: ConfigKeys, trunk: Trunk, default: int | None) -> int:
    """`head_dim` if stated, else the default, else hidden / heads, which must divide."""
    if keys.has("head_dim"):
        return keys.count("head_dim")
    if default is not None:
        return default
    keys.require_multiple(("hidden_size", "num_attention_heads"), (trunk.hidden, trunk.heads))
    return max(trunk.hidden // trunk.heads, 1)


def grouped(
    keys: ConfigKeys,
    trunk: Trunk,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **features: Any,
) -> Attention:
    """Grouped-query attention; `kv_heads` (else: as many as heads) and `head_dim` are defaults."""
    groups = keys.count(*KV_HEADS, default=kv_heads or trunk.heads)
    keys.require_multiple(("num_attention_heads", "num_key_value_heads"), (trunk.heads, groups))
    width = _head_dim(keys, trunk, head_dim)
    features.setdefault("dropout", keys.number("attention_dropout") > 0)
    return Attention(query_heads=trunk.heads, kv_heads=groups, head_dim=width, **features)


def with_windows(attention: Attention, windows: Sequence[int | None]) -> list[Attention]:
    """One attention per layer; layers with the same window share one value."""
    variants = {window: replace(attention, window=window) for window in set(windows)}
    return [variants[window] for window in windows]


def layer_windows(
    keys: ConfigKeys,
    trunk: Trunk,
    window: int | None,
    is_local: Callable[[int], bool],
    kind: str = "sliding_attention",
) -> list[int | None]:
    """The window (or chunk) of each layer by `layer_types`, else by the family's rule.

    `kind` is what the family calls layers that have one.
    """
    types = keys.words("layer_types")
    if not types:
        return [window if is_local(index) else None for index in range(trunk.layers)]
    if len(types) != trunk.layers:
        keys.wrong("layer_types", types, f"a list of num_hidden_layers = {trunk.layers} entries")
        return [None] * trunk.layers
    for unknown in sorted(set(types) - {kind, "full_attention"}):
        keys.wrong("layer_types", unknown, f"made of {kind} and full_attention")
    return [window if each == kind else None for each in types]


def rotary_layers(keys: ConfigKeys, trunk: Trunk) -> list[bool]:
    """Which layers rotate: `no_rope_layers` says 1 for those, else all but every n-th do."""
    stated = keys.layer_indices("no_rope_layers")
    if not stated:
        interval = keys.count("no_rope_layer_interval", default=4)
        return [(index + 1) % interval != 0 for index in range(trunk.layers)]
    if len(stated) != trunk.layers:
        rule = f"a list of num_hidden_layers = {trunk.layers} entries"
        keys.wrong("no_rope_layers", stated, rule)
        return [True] * trunk.layers
    return [bool(flag) for flag in stated]


def assemble(
    keys: ConfigKeys,
    trunk: Trunk,
    blocks: Sequence[Block],
    *,
    tied: bool = False,
    positions: int = 2048,
    **features: Any,
) -> Model:
    """The model value; `tied` and `positions` are the family's defaults."""
    return Model(
        name=keys.name,
        family=str(keys.config.get("model_type") or "unknown"),
        hidden=trunk.hidden,
        blocks=tuple(blocks),
        vocab=trunk.vocab,
        tied=keys.flag("tie_word_embeddings", tied),
        max_position=keys.count(*POSITIONS, default=positions),
        **features,
    )
