"""The model of a row: sizes from its columns, what they do not say from the catalogue by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from triptych.model.catalogue import catalogue
from triptych.model.load import load_model
from triptych.model.model import Attention, Block, Experts, Mlp, Model
from triptych.validate.table import Row, Skip

HEADS = 96
"""Heads of GPT-3 175B, taken where the number of heads is not stated and they divide the width."""

HEAD_DIM = 128
"""Size of a head where they do not."""


def model_of(row: Row) -> Model:
    """The model of a row, by name and sizes or a config.json. Raises Skip if they do not say."""
    if row.text("model_name").endswith(".json"):
        return _read(row.text("model_name"))
    known = _known(row.text("model_name"))
    hidden, layers = row.count("hidden"), row.count("n_layers")
    if not layers and "slice" in row.text("model_name").lower():
        raise Skip("architecture incomplete")
    if not hidden and known:
        return _cut(known, layers or known.num_layers, row)
    vocab = row.count("vocab")
    if not hidden or not vocab or not (layers or row.number("params_b")):
        raise Skip("architecture incomplete")
    layers = layers or _layers_of(row, hidden, vocab)
    if known and known.experts:
        return _cut(replace(known, hidden=hidden, vocab=vocab), layers, row)
    if row.says("moe") or (row.count("ep") or 1) > 1:
        raise Skip("experts not known")
    block = _block(row, hidden, known.blocks[0] if known else _guess(row, hidden))
    style = known or _STYLES[_style(row)]
    return replace(
        style, name=row.text("model_name"), hidden=hidden, vocab=vocab, blocks=(block,) * layers
    )


@lru_cache(maxsize=16)
def _read(path: str) -> Model:
    return load_model(path)


def without_dropout(model: Model) -> Model:
    """A model as programs with fused attention train it today."""
    if not model.dropout:
        return model
    blocks = tuple(
        replace(block, attention=replace(block.attention, dropout=False)) for block in model.blocks
    )
    return replace(model, blocks=blocks, dropout=False)


def _layers_of(row: Row, hidden: int, vocab: int) -> int:
    """Layers by the number of parameters: 12h^2 each beside the embedding (GPT only)."""
    if _style(row) == "llama":
        raise Skip("architecture incomplete")
    parameters = (row.number("params_b") or 0.0) * 1e9
    return max(1, round((parameters - vocab * hidden) / (12.0 * hidden * hidden)))


def _block(row: Row, hidden: int, style: Block) -> Block:
    """A dense block of some style with the sizes of a row."""
    heads = row.count("n_heads") or _usual_heads(hidden)
    kv_heads = row.count("n_kv_heads") or heads
    keeps = style.attention.head_dim if style.attention.query_heads == heads else 0
    attention = replace(
        style.attention, query_heads=heads, kv_heads=kv_heads, head_dim=keeps or hidden // heads
    )
    assert isinstance(style.mlp, Mlp)
    return replace(
        style, attention=attention, mlp=replace(style.mlp, width=_width(row, style, hidden))
    )


def _usual_heads(hidden: int) -> int:
    return HEADS if hidden % HEADS == 0 else max(1, hidden // HEAD_DIM)


# --- styles --------------------------------------------------------------------------------------


def _gpt(name: str, *, dropout: bool, bias: bool, positions: bool, norm: bool = False) -> Model:
    """A style of GPT; sizes are the row's."""
    attention = Attention(
        query_heads=1,
        kv_heads=1,
        head_dim=0,
        qkv_bias=bias,
        out_bias=bias,
        rotary=False,
        dropout=dropout,
    )
    block = Block(attention=attention, mlp=Mlp(width=1, gated=False, bias=bias), norm_bias=bias)
    return Model(
        name=name,
        family="gpt2",
        hidden=1,
        blocks=(block,),
        vocab=1,
        tied=True,
        max_position=2048,
        learned_positions=positions,
        final_norm_bias=bias,
        embedding_norm=norm,
        dropout=dropout,
    )


_LLAMA = Model(
    name="llama",
    family="llama",
    hidden=1,
    blocks=(Block(attention=Attention(query_heads=1, kv_heads=1, head_dim=0), mlp=Mlp(width=1)),),
    vocab=1,
    tied=False,
    max_position=131072,
)

_STYLES: Mapping[str, Model] = {
    "gpt": _gpt("gpt", dropout=True, bias=True, positions=True),
    "bloom": _gpt("bloom", dropout=True, bias=True, positions=False, norm=True),
    "mpt": _gpt("mpt", dropout=False, bias=False, positions=True),
    "llama": _LLAMA,
}


def _style(row: Row) -> str:
    """What kind of transformer a row's name, or the shape of its MLP, speaks of."""
    name = row.text("model_name").lower()
    for style in ("bloom", "mpt", "gpt"):
        if style in name and "gpt-oss" not in name:
            return style
    if any(word in name for word in _LLAMA_LIKE):
        return "llama"
    hidden, width = row.count("hidden") or 1, row.count("ffn_hidden")
    return "gpt" if width in (None, 4 * hidden) else "llama"


_LLAMA_LIKE = ("llama", "internlm", "qwen", "mistral", "mixtral", "baichuan", "yi-")


def _width(row: Row, style: Block, hidden: int) -> int:
    """The feed-forward width; blank: the style's, 4h, or 8h/3 in 256s where it is gated."""
    stated = row.count("ffn_hidden")
    if stated or style.mlp.width > 1:
        return stated or style.mlp.width
    return -(-8 * hidden // 768) * 256 if style.mlp.gated else 4 * hidden


def _guess(row: Row, hidden: int) -> Block:
    return _STYLES[_style(row)].blocks[0]


# --- catalogue -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _by_plain_name() -> Mapping[str, Model]:
    return {_plain(name): model for name, model in catalogue().items()}


def _plain(name: str) -> str:
    """A name without slices, punctuation and case: `Llama3-70B-slice-12L` -> `llama370b`."""
    name = re.sub(r"-slice.*$|\(.*?\)", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", name)


def _known(name: str) -> Model | None:
    known = _by_plain_name()
    plain = _plain(name)
    return known.get(plain) or known.get(plain.replace("moe", "")) or known.get(plain + "v01")


def _cut(model: Model, layers: int, row: Row) -> Model:
    """The first layers of a model; a cut model of experts has the dense layers that it states."""
    blocks = model.blocks
    if layers < len(blocks) and model.experts:
        dense = [block for block in blocks if not isinstance(block.mlp, Experts)]
        sparse = [block for block in blocks if isinstance(block.mlp, Experts)]
        stated = re.search(r"dense_layers=(\d+)", row.text("notes"))
        first = min(len(dense), int(stated.group(1)) if stated else len(dense), layers)
        blocks = (*dense[:first], *sparse[: layers - first])
    return replace(model, blocks=tuple(blocks[:layers]))
